package switching

const (
	// easeStart is how many switches of a batch are under way at once before any hold has told whether there is room for more.
	easeStart = 8
	// easeHold is a hold that is no reason for fewer, in milliseconds, and easeTimes how many times the shortest one is.
	easeHold  = 500
	easeTimes = 3
)

// ease finds out how many switches of a batch may be under way at once. More than the clusters and proxies have room for move nothing sooner: then every topic is
// held for all the others. So there is one more after as many holds as there are switches at once, of which most were short, and
// a third less when most were long.
type ease struct {
	slots float64 // at most; 0: easeStart
	least float64 // the shortest hold, in milliseconds; 0: none
	skip  int     // ends that do not count: they had begun before the last change
	ends  int     // that count since, and how many of them were long
	long  int
}

// most is how many there may be, of at most limit.
func (e *ease) most(limit int) int {
	if e.slots == 0 {
		return min(easeStart, limit)
	}
	return min(max(int(e.slots), 1), limit)
}

// ended takes the hold of a switch; busy others are under way.
func (e *ease) ended(millis float64, busy, limit int) {
	if e.least == 0 || millis < e.least {
		e.least = millis
	}
	if e.skip > 0 {
		e.skip--
		return
	}
	e.ends++
	if millis > max(easeHold, easeTimes*e.least) {
		e.long++
	}
	now := e.most(limit)
	if e.ends < now {
		return
	}
	e.slots = float64(min(now+1, limit))
	if 2*e.long > e.ends {
		e.slots, e.skip = max(1, float64(now)*2/3), busy
	}
	e.ends, e.long = 0, 0
}
