package pulsaradmin

import (
	"context"
	"errors"
	"sync"
)

// Translation is where a message id that somebody got from one cluster lies on the other.
type Translation struct {
	// At is the copy of the entry itself, for a seek to it or a position inside of a batch (batch indexes are the same); NoPosition when there is
	// none: it was a marker, or is gone.
	At Position
	// Next is the first one to be delivered to somebody who has had the entry: right behind the copy. Without one it is the copy of the first message that follows on
	// the old cluster or, where that cannot tell, what follows the last copy of one before it: nothing that he has not had lies before it.
	Next Position
	How  How // "" when copies do not tell
}

// Translator translates stored message ids. It keeps what it has read of a partition for as long as somebody uses it, so that the many readers of one, who all come at a flip,
// cost what one does. Its methods may be called from any goroutine.
type Translator struct {
	mu     sync.Mutex
	shared map[partition]*sharedPair // guarded by mu
}

type partition struct {
	topic    string
	old, now *Client
}

type sharedPair struct {
	*Pair
	users int // guarded by the translator's mu
	load  sync.Once
	err   error // of load
}

// Translate says where a stored message id of cluster old lies on cluster now. topic is the full name, with its partition. An id that means "earliest" or
// "latest" must not be asked: it means the same everywhere.
func (t *Translator) Translate(ctx context.Context, topic string, old, now *Client, pos Position) (Translation, error) {
	key := partition{topic, old, now}
	p := t.enter(key, func() *Pair { return NewPair(topic, old, now) })
	answer, err := p.translate(ctx, pos)
	t.leave(key, p, err != nil)
	return answer, err
}

func (t *Translator) enter(key partition, open func() *Pair) *sharedPair {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.shared[key]
	if p == nil {
		p = &sharedPair{Pair: open()}
		if t.shared == nil {
			t.shared = make(map[partition]*sharedPair)
		}
		t.shared[key] = p
	}
	p.users++
	return p
}

// leave ends a use. After a failure whoever comes next reads anew.
func (t *Translator) leave(key partition, p *sharedPair, failed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p.users--
	if t.shared[key] == p && (failed || p.users == 0) {
		delete(t.shared, key)
	}
	if p.users == 0 {
		p.Close()
	}
}

func (p *sharedPair) translate(ctx context.Context, pos Position) (Translation, error) {
	p.load.Do(func() { p.err = p.LoadForIDs(ctx) })
	if p.err != nil {
		return Translation{}, p.err
	}
	return p.Translate(ctx, pos)
}

// LoadForIDs is Load for Translate alone: the old cluster may not have the topic any more.
func (p *Pair) LoadForIDs(ctx context.Context) error {
	err := p.Load(ctx)
	if errors.Is(err, ErrNotFound) {
		return p.to.load(ctx)
	}
	return err
}

// Translate is Translator.Translate, over what was loaded.
func (p *Pair) Translate(ctx context.Context, pos Position) (Translation, error) {
	if old := &p.from.in; old.Len() == 0 || !old.Has(pos) && pos.Before(old.End()) {
		return p.byCopies(ctx, pos) // the new cluster may still have what the old one removed
	}
	f, err := p.Find(ctx, pos)
	switch {
	case err != nil:
		return Translation{}, err
	case f.How == NotThere:
		return p.byCopies(ctx, pos)
	case f.Entry.Position != pos || !f.How.Exact(): // the entry itself is no message, or has no copy: what follows it counts
		return Translation{At: NoPosition, Next: f.Position, How: f.How}, nil
	}
	return Translation{At: f.Position, Next: f.Next, How: f.How}, nil
}

// byCopies is Translate by what the copies on the new cluster say alone.
func (p *Pair) byCopies(ctx context.Context, pos Position) (Translation, error) {
	at, how, lo, err := p.search(ctx, key{cluster: p.from.Cluster(), position: pos}, p.to.in.End())
	switch {
	case errors.Is(err, errElsewhere):
		how = NotThere
	case err != nil:
		return Translation{}, err
	case how == ByOrigin:
		return Translation{At: at, Next: Position{at.Ledger, at.Entry + 1}, How: how}, nil
	}
	if lo < p.to.in.Len() {
		return Translation{At: NoPosition, Next: p.to.in.At(lo), How: how}, nil
	}
	return Translation{At: NoPosition, Next: p.to.in.End(), How: how}, nil
}
