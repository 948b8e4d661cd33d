package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
)

// TranslateAlone is Translate without the old cluster, which is dead: by the copies on cluster now, as far as they say where they come from. The error says when they
// do not, and when the message never came there.
func TranslateAlone(ctx context.Context, topic, old string, now *Client, pos Position) (Translation, error) {
	p := newPair(topic, dead{cluster: old}, &remote{Client: now, topic: topic})
	defer p.Close()
	if err := p.to.load(ctx); err != nil {
		return Translation{}, err
	}
	return p.translateAlone(ctx, pos)
}

func (p *Pair) translateAlone(ctx context.Context, pos Position) (Translation, error) {
	old, now := p.from.Cluster(), p.to.Cluster()
	none := func(why string) (Translation, error) {
		return Translation{}, fmt.Errorf("%s: cluster %s is dead, and %s", p.Topic, old, why)
	}
	if p.to.in.Len() == 0 {
		return none("cluster " + now + " has no message")
	}
	at, how, err := p.search(ctx, key{cluster: old, position: pos}, p.to.in.End())
	switch {
	case err != nil:
		return Translation{}, err
	case how == ByOrigin:
		return Translation{At: at, Next: Position{at.Ledger, at.Entry + 1}, How: how}, nil
	case how == NotThere: // a marker, or removed by retention: what follows counts
		return Translation{At: NoPosition, Next: at, How: how}, nil
	case how == AtEnd:
		return none("the message at " + pos.String() + " never came to cluster " + now)
	}
	return none("the copies on cluster " + now + " do not say where they come from")
}

// dead is the side of a cluster that is not asked.
type dead struct {
	side
	cluster string
}

func (d dead) Cluster() string { return d.cluster }
func (d dead) Close()          {}
func (d dead) Load(context.Context) (Internal, error) {
	return Internal{}, errors.New("cluster " + d.cluster + " is dead and not asked")
}
