package netio

import (
	"os"
	"reflect"
	"syscall"
	"unsafe"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"
)

// maxEvents is how many events are taken from the kernel at a time.
const maxEvents = 256

// poll waits for events and handles them until the loop ends. It waits on the poller's epoll instance by itself, because the poller's
// Polling yields to the scheduler each time before it blocks, and that wakes another thread in vain: twice the context switches and a
// quarter more CPU per message at a low rate (docs/adr/001-event-loop.md). Should the instance not be found any more, Polling does.
func (l *loop) poll() error {
	fd, ok := epollDescriptor(l.poller)
	if !ok {
		return l.poller.Polling(l.event)
	}
	l.direct = true
	events := make([]unix.EpollEvent, maxEvents)
	wait, poll := -1, 0
	for {
		// A look before a sleep: telling the scheduler about a call that does not block only costs.
		n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), maxEvents, uintptr(poll), 0, 0)
		if errno == 0 && n == 0 && len(l.ready) == 0 {
			n, _, errno = syscall.Syscall6(unix.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), maxEvents, uintptr(wait), 0, 0)
		}
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return os.NewSyscallError("epoll_pwait", errno)
		}
		for i := range events[:n] {
			if err := l.handle(int(events[i].Fd), events[i].Events, 0); err != nil {
				return err
			}
		}
		if len(l.ready) > 0 {
			if err := l.goOn(); err != nil {
				return err
			}
		}
		if err := l.endTurn(); err != nil {
			return err
		}
	}
}

// epollDescriptor is the epoll instance of p, which p does not export.
func epollDescriptor(p *netpoll.Poller) (fd uintptr, ok bool) {
	f := reflect.ValueOf(p).Elem().FieldByName("fd")
	if !f.IsValid() || f.Kind() != reflect.Int || f.Int() <= 0 {
		return 0, false
	}
	return uintptr(f.Int()), true
}
