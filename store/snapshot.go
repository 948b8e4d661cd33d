package store

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"pointsman/core/route"
	"pointsman/core/switching"
)

// A snapshot is a whole map at one sequence number. The first byte of each payload says what it is; the end record
// makes sure that nothing was cut off between two frames.
const (
	snapshotHead   = 'H' // JSON snapshotHeader
	snapshotBucket = 'B' // uint16 index, stored bucket
	snapshotRules  = 'R' // JSON []route.Rule
	snapshotSwitch = 'S' // JSON switchState, oldest first
	snapshotKey    = 'K' // the tag key
	snapshotBatch  = 'A' // JSON batchState
	snapshotEnd    = 'E' // JSON number of the payloads before it

	snapshotFormat = 1
)

type snapshotHeader struct {
	Format int    `json:"format"`
	Seq    uint64 `json:"seq"`
}

// image is a copy of a core's state that may be written while the core goes on.
type image struct {
	seq      uint64
	buckets  [route.BucketCount][]route.Entry
	rules    []route.Rule
	switches [][]byte
	tagKey   []byte
	batches  [][]byte
}

func (c *core) image() (*image, error) {
	im := &image{seq: c.seq, buckets: c.buckets, rules: c.rules, tagKey: c.tagKey}
	for _, id := range c.order {
		text, err := json.Marshal(c.switches[id])
		if err != nil {
			return nil, err
		}
		im.switches = append(im.switches, text)
	}
	for _, b := range c.batches {
		text, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		im.batches = append(im.batches, text)
	}
	return im, nil
}

// write returns the size of the snapshot.
func (im *image) write(dir string) (int64, error) {
	var size int64
	err := writeFile(dir, snapshotName(im.seq), func(out io.Writer) error {
		w := bufio.NewWriterSize(out, 1<<20)
		count := 0
		put := func(kind byte, body []byte) error {
			frame := appendFrame(nil, append([]byte{kind}, body...))
			size += int64(len(frame))
			count++
			_, err := w.Write(frame)
			return err
		}
		putJSON := func(kind byte, v any) error {
			body, err := json.Marshal(v)
			if err != nil {
				return err
			}
			return put(kind, body)
		}
		if err := putJSON(snapshotHead, snapshotHeader{snapshotFormat, im.seq}); err != nil {
			return err
		}
		for i, b := range im.buckets {
			if len(b) == 0 {
				continue
			}
			if err := put(snapshotBucket, NewBucket(b).Append(binary.BigEndian.AppendUint16(nil, uint16(i)))); err != nil {
				return err
			}
		}
		if err := putJSON(snapshotRules, im.rules); err != nil {
			return err
		}
		for _, s := range im.switches {
			if err := put(snapshotSwitch, s); err != nil {
				return err
			}
		}
		if im.tagKey != nil {
			if err := put(snapshotKey, im.tagKey); err != nil {
				return err
			}
		}
		for _, b := range im.batches {
			if err := put(snapshotBatch, b); err != nil {
				return err
			}
		}
		if err := putJSON(snapshotEnd, count); err != nil {
			return err
		}
		return w.Flush()
	})
	return size, err
}

// readSnapshot reads a whole snapshot, or fails.
func readSnapshot(dir string, seq uint64) (*core, int64, error) {
	name := filepath.Join(dir, snapshotName(seq))
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, 0, err
	}
	c := newCore()
	count, ended := 0, false
	_, clean, _, err := readFrames(data, func(payload []byte) error {
		if ended || len(payload) == 0 {
			return fmt.Errorf("payload %d is out of place", count)
		}
		var err error
		switch body := payload[1:]; payload[0] {
		case snapshotHead:
			var h snapshotHeader
			if err = json.Unmarshal(body, &h); err == nil && (h.Format != snapshotFormat || h.Seq != seq || count != 0) {
				err = fmt.Errorf("format %d, sequence number %d: want format %d, sequence number %d", h.Format, h.Seq, snapshotFormat, seq)
			}
		case snapshotBucket:
			err = c.readBucket(body)
		case snapshotRules:
			err = json.Unmarshal(body, &c.rules)
		case snapshotSwitch:
			var s switchState
			if err = json.Unmarshal(body, &s); err == nil {
				c.putSwitch(&s)
			}
		case snapshotBatch:
			s := batchState{}
			if err = json.Unmarshal(body, &s); err == nil {
				if s.Parts == nil {
					s.Parts = map[int]switching.BatchPart{}
				}
				c.batches[s.Batch.ID] = &s
			}
		case snapshotKey:
			c.tagKey = append([]byte(nil), body...)
		case snapshotEnd:
			var n int
			ended = true
			if err = json.Unmarshal(body, &n); err == nil && n != count {
				err = fmt.Errorf("%d payloads before the end, %d expected", count, n)
			}
		default:
			err = fmt.Errorf("payload %d is of unknown kind %q", count, payload[0])
		}
		count++
		return err
	})
	if err == nil && (!clean || !ended) {
		err = fmt.Errorf("it ends too early, after %d payloads", count)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("%s is damaged: %w", name, err)
	}
	c.seq = seq
	return c, int64(len(data)), nil
}

func (c *core) readBucket(body []byte) error {
	if len(body) < 2 || int(binary.BigEndian.Uint16(body)) >= route.BucketCount {
		return fmt.Errorf("a bucket has no valid index")
	}
	index := int(binary.BigEndian.Uint16(body))
	b, err := decodeBucket(index, body[2:])
	if err != nil {
		return fmt.Errorf("bucket %04d: %w", index, err)
	}
	c.buckets[index] = b.Entries()
	return nil
}
