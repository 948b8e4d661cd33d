//go:build !linux

package main

import "errors"

func run([]string) error {
	return errors.New("pointsman-bench needs Linux: it reads processor time from /proc and drives its sockets with epoll")
}
