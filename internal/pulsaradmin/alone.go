package pulsaradmin

import (
	"context"
	"errors"
	"fmt"
)

// TranslateAlone is Translator.Translate without the old cluster, which is dead: by the copies on cluster now, as far as they say where they come from. The error says when they
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
	t, err := p.byCopies(ctx, pos)
	switch {
	case err != nil:
		return Translation{}, err
	case t.How == AtEnd:
		return none("the message at " + pos.String() + " never came to cluster " + now)
	case t.How == "":
		return none("the copies on cluster " + now + " do not say where they come from")
	}
	return t, nil
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
