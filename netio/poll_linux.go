package netio

import (
	"os"
	"reflect"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"github.com/panjf2000/gnet/v2/pkg/netpoll"
	"golang.org/x/sys/unix"
)

// maxEvents is how many events are taken from the kernel at a time.
const maxEvents = 256

// A loop with traffic keeps its processor of the Go scheduler while it waits, for keepWait milliseconds at most, and gives it up every
// keepTime, the length of the scheduler's own turns. Giving it up for each wait and getting it back costs more than a small message
// does, and keeps the scheduler's monitor awake besides (docs/adr/003-relay-cost.md).
const (
	keepWait = 1
	keepTime = 10 * time.Millisecond
)

// lookForEvents waits for at most ms milliseconds without telling the Go scheduler.
func lookForEvents(fd uintptr, events []unix.EpollEvent, ms int) (n int, errno syscall.Errno) {
	r, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(ms), 0, 0)
	return int(r), errno
}

// waitForEvents waits for as long as it takes; the Go scheduler knows.
func waitForEvents(fd uintptr, events []unix.EpollEvent) (n int, errno syscall.Errno) {
	const forever = ^uintptr(0)
	r, _, errno := syscall.Syscall6(unix.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), forever, 0, 0)
	return int(r), errno
}

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
	var released time.Time // when the scheduler last knew that the loop waits
	for {
		// A look before a sleep: telling the scheduler about a call that does not block only costs.
		n, errno := lookForEvents(fd, events, 0)
		if errno == 0 && n == 0 && len(l.ready) == 0 {
			if l.now.Sub(released) < keepTime {
				n, errno = lookForEvents(fd, events, keepWait)
			}
			if errno == 0 && n == 0 {
				n, errno = waitForEvents(fd, events)
				released = time.Now()
			}
		}
		if errno == unix.EINTR { // the scheduler wants the processor, perhaps
			runtime.Gosched()
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
