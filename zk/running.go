package zk

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"

	"pointsman/core/switching"
	"pointsman/store"
)

// Running implements store.Store. Each switch that is not over has a node in running, which is made and removed in the write
// of its record.
func (s *Store) Running(ctx context.Context) ([]switching.Record, error) {
	ctx, cancel := withDefaultTimeout(ctx)
	defer cancel()
	if err := s.boot(ctx); err != nil {
		return nil, err
	}
	if err := s.makeIndex(ctx); err != nil {
		return nil, err
	}
	var running []switching.Record
	var faults error
	err := s.synced(ctx, func() error {
		ids, err := s.children(ctx, s.root+"/running")
		if err != nil {
			return err
		}
		records, errs := make([]switching.Record, len(ids)), make([]error, len(ids))
		err = parallel(len(ids), func(i int) error {
			records[i], _, errs[i] = s.record(ctx, ids[i])
			if errors.Is(errs[i], store.ErrUnavailable) || errors.Is(errs[i], store.ErrClosed) {
				return errs[i]
			}
			return nil
		})
		running, faults = nil, nil
		for i, r := range records {
			switch {
			case errors.Is(errs[i], store.ErrNotFound): // removed by hand
			case errs[i] != nil:
				faults = errors.Join(faults, errs[i])
			case !r.State.Over():
				running = append(running, r)
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	store.SortRecords(running)
	return running, faults
}

// runningWhole is what the node above the index holds once the index is whole.
const runningWhole = "whole"

// makeIndex makes the nodes of switches that were begun before there was an index, once for each tree. It lists every switch of
// the history, which nothing else does.
func (s *Store) makeIndex(ctx context.Context) error {
	if s.indexed.Load() {
		return nil
	}
	path := s.root + "/running"
	if err := s.sync(ctx); err != nil {
		return err
	}
	n, err := s.get(ctx, path)
	if err != nil {
		return err
	}
	if !n.exists() {
		return s.rootGone(path)
	}
	if string(n.data) != runningWhole {
		ids, err := s.children(ctx, s.root+"/switches")
		if err != nil {
			return err
		}
		err = parallel(len(ids), func(i int) error { return s.index(ctx, ids[i]) })
		if err == nil {
			err = s.put(ctx, path, []byte(runningWhole))
		}
		if err != nil {
			return fmt.Errorf("listing the switches that are under way, for the first time: %w", err)
		}
	}
	s.indexed.Store(true)
	return nil
}

// index makes the node of a switch if it is not over.
func (s *Store) index(ctx context.Context, id string) error {
	for {
		r, n, err := s.record(ctx, id)
		switch {
		case errors.Is(err, store.ErrUnavailable), errors.Is(err, store.ErrClosed):
			return err
		case err == nil && r.State.Over(), errors.Is(err, store.ErrNotFound):
			return nil
		case err != nil:
			// Nobody can say whether it is over. With a node it is named to the operator wherever running switches are listed.
			return s.ensure(ctx, s.runningPath(id), nil, s.acl)
		}
		if index, err := s.get(ctx, s.runningPath(id)); err != nil || index.exists() {
			return err
		}
		// The record is written as it is: whoever has read it before, to end the switch, reads again and finds the node.
		path := s.switchPath(id)
		_, err = call(ctx, s.client, func(c *zk.Conn) ([]zk.MultiResponse, error) {
			return c.Multi(&zk.SetDataRequest{Path: path, Data: n.data, Version: n.stat.Version}, &zk.CreateRequest{Path: s.runningPath(id), Acl: s.acl})
		})
		switch {
		case err == nil:
			return nil
		case errors.Is(err, zk.ErrBadVersion), errors.Is(err, zk.ErrNodeExists), errors.Is(err, zk.ErrNoNode), lostAnswer(err) && ctx.Err() == nil:
			if err := pause(ctx, 5*time.Millisecond); err != nil {
				return s.client.describe(ctx, "listing switch "+id+" as running", err)
			}
		default:
			return s.client.describe(ctx, "listing switch "+id+" as running", err)
		}
	}
}
