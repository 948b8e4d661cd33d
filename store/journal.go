package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Both kinds of file of a file store, journal segments and snapshots, are sequences of frames:
//
//	"PMF1" | length of the payload, uint32 | CRC-32C of the payload, uint32 | payload
//
// A journal segment is named after the sequence number of its first record. Every record was synced before its write
// was confirmed, so a crash can leave at most one broken frame, at the very end of the newest segment: that one is cut
// off. Any other broken frame is damage that must not be passed over in silence.
const (
	frameMagic  = "PMF1"
	frameHeader = 12
	// maxFrame bounds a payload, so that a damaged length costs no memory.
	maxFrame = 64 << 20

	segmentPrefix  = "journal-"
	snapshotPrefix = "snapshot-"
	temporaryEnd   = ".tmp"
)

func appendFrame(dst, payload []byte) []byte {
	dst = append(dst, frameMagic...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(payload)))
	dst = binary.BigEndian.AppendUint32(dst, crc32.Checksum(payload, castagnoli()))
	return append(dst, payload...)
}

// errBrokenFrame: the bytes do not begin with a whole, undamaged frame.
var errBrokenFrame = errors.New("broken frame")

// parseFrame returns a view of the payload of the frame at the start of src, valid as long as src, and the size of the
// whole frame.
func parseFrame(src []byte) (payload []byte, n int, err error) {
	if len(src) < frameHeader || string(src[:len(frameMagic)]) != frameMagic {
		return nil, 0, errBrokenFrame
	}
	size := binary.BigEndian.Uint32(src[4:])
	if size > maxFrame || int(size) > len(src)-frameHeader {
		return nil, 0, errBrokenFrame
	}
	payload = src[frameHeader : frameHeader+int(size)]
	if crc32.Checksum(payload, castagnoli()) != binary.BigEndian.Uint32(src[8:]) {
		return nil, 0, errBrokenFrame
	}
	return payload, frameHeader + int(size), nil
}

// readFrames calls f with each payload of src and returns the offset behind the last good frame. clean is false when
// bytes follow it; more tells whether an undamaged frame is among those, which a torn write cannot explain.
func readFrames(src []byte, f func(payload []byte) error) (end int, clean, more bool, err error) {
	for end < len(src) {
		payload, n, err := parseFrame(src[end:])
		if err != nil {
			return end, false, anotherFrame(src[end:]), nil
		}
		if err := f(payload); err != nil {
			return end, true, false, fmt.Errorf("at byte %d: %w", end, err)
		}
		end += n
	}
	return end, true, false, nil
}

func anotherFrame(src []byte) bool {
	for i := 1; ; {
		next := bytes.Index(src[i:], []byte(frameMagic))
		if next < 0 {
			return false
		}
		i += next
		if _, _, err := parseFrame(src[i:]); err == nil {
			return true
		}
		i++
		if i >= len(src) {
			return false
		}
	}
}

// journal is the newest segment, open for appending. Guarded by its owner's mutex.
type journal struct {
	dir   string
	file  *os.File // nil: the next append makes a new segment
	first uint64   // sequence number of the newest segment's first record
	size  int64
	count int
	// broken, when not nil, is why nothing is appended any more.
	broken error
}

// append writes and syncs one record. After an error the record is not in the journal; when that cannot be promised,
// every later append fails as well.
func (j *journal) append(seq uint64, payload []byte) error {
	if j.broken != nil {
		return j.broken
	}
	if j.file == nil {
		if err := j.create(seq); err != nil {
			return err
		}
	}
	frame := appendFrame(nil, payload)
	_, err := j.file.WriteAt(frame, j.size)
	if err == nil {
		err = j.file.Sync()
		if err != nil {
			// After a failed sync nobody knows what the disk holds, and a second sync would not tell.
			j.broken = fmt.Errorf("syncing %s failed: %w; %w", j.file.Name(), err, errUnwritable)
			_ = j.file.Truncate(j.size)
			return j.broken
		}
		j.size += int64(len(frame))
		j.count++
		return nil
	}
	err = fmt.Errorf("writing %s failed: %w", j.file.Name(), err)
	if undo := j.file.Truncate(j.size); undo != nil {
		j.broken = fmt.Errorf("%w; undoing it failed: %w; %w", err, undo, errUnwritable)
		return j.broken
	}
	return err
}

func (j *journal) create(seq uint64) error {
	name := filepath.Join(j.dir, segmentName(seq))
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("creating a journal segment failed: %w", err)
	}
	if err := syncDir(j.dir); err != nil {
		_ = f.Close()
		_ = os.Remove(name)
		return err
	}
	j.file, j.first, j.size, j.count = f, seq, 0, 0
	return nil
}

// roll ends the newest segment.
func (j *journal) roll() error {
	if j.file == nil {
		return nil
	}
	err := j.file.Close()
	j.file = nil
	return err
}

func segmentName(first uint64) string { return fmt.Sprintf("%s%020d", segmentPrefix, first) }

func snapshotName(seq uint64) string { return fmt.Sprintf("%s%020d", snapshotPrefix, seq) }

// numbered lists the numbers in the names of the files of dir that begin with prefix, smallest first.
func numbered(dir, prefix string) ([]uint64, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var numbers []uint64
	for _, f := range files {
		text, ok := strings.CutPrefix(f.Name(), prefix)
		if !ok || strings.HasSuffix(text, temporaryEnd) {
			continue
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s is no file of a map store: move it away", filepath.Join(dir, f.Name()))
		}
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	return numbers, nil
}

// writeFile makes a file whole or not at all: under a temporary name, synced, renamed, and the directory synced.
func writeFile(dir, name string, write func(io.Writer) error) error {
	final := filepath.Join(dir, name)
	f, err := os.OpenFile(final+temporaryEnd, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = os.Rename(final+temporaryEnd, final)
	}
	if err != nil {
		_ = os.Remove(final + temporaryEnd)
		return fmt.Errorf("writing %s failed: %w", final, err)
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closing := d.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return fmt.Errorf("syncing directory %s failed: %w", dir, err)
	}
	return nil
}
