package config

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Key is one line of the reference.
type Key struct {
	Key     string `json:"key"` // path; clusters.NAME.… for what each cluster has
	Type    string `json:"type"`
	Default string `json:"default"`
	Doc     string `json:"doc"`
}

const clusterPrefix = "clusters.NAME."

// Reference lists every key that holds a value, in the order of the struct.
func Reference() []Key {
	return appendKeys(nil, "", reflect.ValueOf(Default()).Elem())
}

func appendKeys(dst []Key, path string, v reflect.Value) []Key {
	for f, field := range v.Fields() {
		if !f.IsExported() {
			continue
		}
		full := join(path, f.Tag.Get("key"))
		switch {
		case field.Kind() == reflect.Struct:
			dst = appendKeys(dst, full, field)
		case field.Kind() == reflect.Pointer:
			dst = appendKeys(dst, full, reflect.Zero(field.Type().Elem()))
		case field.Type() == reflect.TypeFor[map[string]*Cluster]():
			dst = appendKeys(dst, strings.TrimSuffix(clusterPrefix, "."), reflect.ValueOf(Cluster{}))
		default:
			dst = append(dst, Key{Key: full, Type: typeName(field), Default: text(field), Doc: f.Tag.Get("doc")})
		}
	}
	return dst
}

func typeName(v reflect.Value) string {
	switch v.Interface().(type) {
	case Duration:
		return "duration"
	case Size:
		return "size"
	case []string:
		return "list"
	case map[string]string:
		return "mapping"
	case bool:
		return "true/false"
	case int:
		return "number"
	}
	return "text"
}

// text is a leaf as YAML would have it.
func text(v reflect.Value) string {
	switch v.Interface().(type) {
	case []string:
		return "[]"
	case map[string]string:
		return "{}"
	case string:
		if v.Len() == 0 {
			return `""`
		}
	}
	return fmt.Sprint(v.Interface())
}

// WriteDefaults writes the defaults as a commented YAML file to start from.
func WriteDefaults(w io.Writer) {
	writeStruct(w, "", reflect.ValueOf(Default()).Elem())
}

func writeStruct(w io.Writer, indent string, v reflect.Value) {
	for f, field := range v.Fields() {
		if !f.IsExported() {
			continue
		}
		fmt.Fprintf(w, "%s# %s\n", indent, f.Tag.Get("doc"))
		key := f.Tag.Get("key")
		switch {
		case field.Kind() == reflect.Struct:
			fmt.Fprintf(w, "%s%s:\n", indent, key)
			writeStruct(w, indent+"  ", field)
		case field.Kind() == reflect.Pointer: // its presence says something: shown, not set
			var sample strings.Builder
			writeStruct(&sample, "  ", reflect.Zero(field.Type().Elem()))
			fmt.Fprintf(w, "%s#%s:\n", indent, key)
			for line := range strings.Lines(sample.String()) {
				fmt.Fprint(w, indent+"#"+line)
			}
		case field.Type() == reflect.TypeFor[map[string]*Cluster]():
			fmt.Fprintf(w, "%s%s: {}\n%s#  NAME:\n", indent, key, indent)
			var sample strings.Builder
			writeStruct(&sample, "    ", reflect.ValueOf(Cluster{}))
			for line := range strings.Lines(sample.String()) {
				fmt.Fprint(w, indent+"#"+line)
			}
		default:
			fmt.Fprintf(w, "%s%s: %s\n", indent, key, text(field))
		}
	}
}

// Value is what one key is set to.
type Value struct {
	Key   string `json:"key"`
	Value string `json:"value"`
	From  string `json:"from"` // file:line, an environment variable, --set or default
}

// Values lists what every key is set to, the keys of each cluster included. Secrets are only ever named by their files.
func (c *Config) Values() []Value {
	return c.appendValues(nil, "", reflect.ValueOf(c).Elem())
}

func (c *Config) appendValues(dst []Value, path string, v reflect.Value) []Value {
	for f, field := range v.Fields() {
		if !f.IsExported() {
			continue
		}
		full := join(path, f.Tag.Get("key"))
		switch {
		case field.Kind() == reflect.Struct:
			dst = c.appendValues(dst, full, field)
		case field.Kind() == reflect.Pointer:
			if !field.IsNil() {
				dst = c.appendValues(dst, full, field.Elem())
			}
		case field.Type() == reflect.TypeFor[map[string]*Cluster]():
			for _, name := range slices.Sorted(maps.Keys(c.Clusters)) {
				dst = c.appendValues(dst, full+"."+name, reflect.ValueOf(c.Clusters[name]).Elem())
			}
		default:
			value := text(field)
			switch x := field.Interface().(type) {
			case []string:
				value = "[" + strings.Join(x, ", ") + "]"
			case map[string]string:
				var pairs []string
				for _, from := range slices.Sorted(maps.Keys(x)) {
					pairs = append(pairs, from+" → "+x[from])
				}
				value = "{" + strings.Join(pairs, ", ") + "}"
			}
			dst = append(dst, Value{Key: full, Value: value, From: cmp.Or(c.origin[full], "default")})
		}
	}
	return dst
}
