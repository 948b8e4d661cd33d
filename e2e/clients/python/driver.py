"""The Python client (which wraps the C++ client) behind the common command line of the client drivers (see ../README.md)."""

import argparse
import base64
import collections
import json
import re
import sys
import threading
import time
import zlib

import pulsar

FLUSH_INTERVAL = 0.005  # seconds that a line may wait for more
SHORTEST_WAIT = 0.001  # a wait for less is none: at high rates, waking up costs more than it brings
BUFFER = 64 << 10
OUT = open(sys.stdout.fileno(), "w", buffering=BUFFER, closefd=False)
OUT_LOCK = threading.Lock()
FILLER = bytearray()  # as long as it was needed so far
TYPES = {
    "exclusive": pulsar.ConsumerType.Exclusive,
    "shared": pulsar.ConsumerType.Shared,
    "failover": pulsar.ConsumerType.Failover,
    "key_shared": pulsar.ConsumerType.KeyShared,
}


def emit(**event):
    say(json.dumps(event, separators=(",", ":")) + "\n")


def say(line):
    with OUT_LOCK:
        OUT.write(line)


def flush_for_ever():
    while True:
        time.sleep(FLUSH_INTERVAL)
        with OUT_LOCK:
            OUT.flush()


def error(what, failure, n=-1):
    emit(e="error", what=what, n=n, t=micros() / 1000, text=str(failure))


def micros():
    return time.time_ns() // 1000


def payload_of(n, size):
    """The number, a semicolon, then printable filler that differs from number to number."""
    head = b"%d;" % n
    filler = max(size - len(head), 0)
    while len(FILLER) < filler + 90:
        FILLER.extend(range(32, 122))
    return head + FILLER[n % 90 : n % 90 + filler]


def number_of(payload):
    head, mark, _ = payload[:24].partition(b";")
    return int(head) if mark and head.isdigit() else -1


class Tally:
    """When a consume or reader run ends: after the wanted count and the linger, or when nothing comes any more."""

    def __init__(self, args):
        self.args = args
        self.lock = threading.Lock()
        self.seen = 0
        self.last = time.monotonic()

    def one(self):
        with self.lock:
            self.seen += 1
            self.last = time.monotonic()

    def goes_on(self):
        with self.lock:
            limit = self.args.linger if self.seen >= self.args.count else self.args.idle
            return (time.monotonic() - self.last) * 1000 < limit


class Driver:
    def __init__(self, args):
        self.args = args
        self.producing = threading.Event()
        self.producing.set()
        self.running = threading.Event()
        self.running.set()
        self.client = self.connect(args.url)

    def connect(self, url):
        # The library writes its log to standard output unless told otherwise.
        logger = pulsar.FileLogger(pulsar.LoggerLevel.Info, "/dev/stderr")
        args = self.args
        trust = {"tls_trust_certs_file_path": args.ca, "tls_validate_hostname": True} if args.ca else {}
        return pulsar.Client(url, logger=logger, **trust)

    # ---- producing

    def produce(self, topic, k, rate, count):
        args = self.args
        batch = args.batch and not args.chunk
        settings = {
            "batching_enabled": batch,
            "chunking_enabled": args.chunk,
            "block_if_queue_full": True,
            "max_pending_messages": 2000,
        }
        if args.send_timeout:
            settings["send_timeout_millis"] = args.send_timeout
        if batch:
            settings["batching_max_publish_delay_ms"] = 1
            if args.keys:
                settings["batching_type"] = pulsar.BatchingType.KeyBased
        try:
            producer = self.client.create_producer(topic, **settings)
        except Exception as failure:  # pulsar raises a class per result code
            error("producer", failure)
            return
        emit(e="ready", what="producer", k=k)
        outstanding = Outstanding()
        began = time.monotonic()
        i = 0
        while i < count and self.producing.is_set():
            if rate:
                wait = began + i / rate - time.monotonic()
                if wait > SHORTEST_WAIT:
                    time.sleep(wait)
            n = args.start + i
            i += 1
            payload = payload_of(n, args.size)
            key = "key-%d" % (n % args.keys) if args.keys else None
            if args.sync:
                try:
                    producer.send(payload, partition_key=key)
                    acked(n, k, payload)
                except Exception as failure:
                    error("send", failure, n)
                continue
            outstanding.add()
            try:
                producer.send_async(payload, outstanding.callback(n, k, payload), partition_key=key)
            except Exception as failure:
                error("send", failure, n)
                outstanding.remove()
        try:
            producer.flush()
        except Exception as failure:
            error("flush", failure)
        outstanding.wait()
        closing("producer", producer)

    # ---- consuming

    def subs(self):
        args = self.args
        one = "%s:%s:%s:%d" % (args.sub, args.type, args.ack, args.consumers)
        return [Sub(text) for text in (args.subs or one).split(",")]

    def stored_id(self):
        return pulsar.MessageId.deserialize(base64.b64decode(self.args.from_id))

    def subscribe(self, client, topic, k, sub, c):
        names = topic.split(",")
        consumer = client.subscribe(
            re.compile(topic) if self.args.pattern else names if len(names) > 1 else topic,
            sub.name,
            consumer_type=TYPES[sub.kind],
            consumer_name="consumer-%d" % c,
            initial_position=pulsar.InitialPosition.Earliest,
            replicate_subscription_state_enabled=self.args.replicated,
        )
        if self.args.from_id:
            consumer.seek(self.stored_id())
        if self.args.from_time:
            consumer.seek(self.args.from_time)
        emit(e="ready", what="consumer", k=k, c=c)
        return consumer

    def consume(self):
        tally = Tally(self.args)
        sub = self.subs()[0]
        threads = []
        for c in range(sub.consumers):
            try:
                consumer = self.subscribe(self.client, self.args.topic, 0, sub, c)
            except Exception as failure:
                error("subscribe", failure)
                continue
            threads.append(start(self.receive_all, consumer, 0, sub, c, tally))
        for thread in threads:
            thread.join()

    def receive_all(self, consumer, k, sub, c, tally):
        in_hand = collections.deque()

        def acknowledge_down_to(lag):
            while len(in_hand) > lag:
                message = in_hand.popleft()
                try:
                    (consumer.acknowledge_cumulative if sub.cumulative else consumer.acknowledge)(message)
                except Exception as failure:
                    error("acknowledge", failure)

        while self.running.is_set() and (tally is None or tally.goes_on()):
            try:
                message = consumer.receive(timeout_millis=100)
            except pulsar.Timeout:
                continue
            except Exception as failure:
                error("receive", failure)
                break
            self.received(message, k, sub.name, c)
            if not self.args.skip or number_of(message.data()) % self.args.skip:
                in_hand.append(message)
            acknowledge_down_to(self.args.lag)
            if tally is not None:
                tally.one()
        acknowledge_down_to(0)
        closing("consumer", consumer)

    def open_reader(self, client, topic, k):
        reader = client.create_reader(topic, self.stored_id() if self.args.from_id else pulsar.MessageId.earliest)
        if self.args.from_time:
            reader.seek(self.args.from_time)
        emit(e="ready", what="reader", k=k)
        return reader

    def read(self):
        try:
            reader = self.open_reader(self.client, self.args.topic, 0)
            if self.args.to_end:
                while reader.has_message_available():
                    self.received(reader.read_next(), 0, "", 0)
            else:
                self.read_all(reader, 0, Tally(self.args))
        except Exception as failure:
            error("reader", failure)
            return
        closing("reader", reader)

    def read_all(self, reader, k, tally):
        while self.running.is_set() and (tally is None or tally.goes_on()):
            try:
                message = reader.read_next(timeout_millis=100)
            except pulsar.Timeout:
                continue
            except Exception as failure:
                error("read", failure)
                break
            self.received(message, k, "reader" if tally is None else "", 0)
            if tally is not None:
                tally.one()

    def received(self, message, k, sub, c):
        payload = message.data()
        stored = base64.b64encode(message.message_id().serialize()).decode() if self.args.ids else ""
        crc = zlib.crc32(payload)
        say("r\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n" % (number_of(payload), micros(), crc, k, c, sub, message.partition_key(), stored))

    # ---- live

    def live(self):
        topics = self.args.topics.split(",")
        rates = [int(rate) for rate in self.args.rates.split(",")]
        reading = self.connect(self.args.read_url) if self.args.read_url else self.client
        consumers = []
        for k, topic in enumerate(topics):
            try:
                for sub in self.subs():
                    for c in range(sub.consumers):
                        consumers.append((self.receive_all, self.subscribe(reading, topic, k, sub, c), k, sub, c, None))
                if self.args.reader:
                    consumers.append((self.read_all, self.open_reader(reading, topic, k), k, None))
            except Exception as failure:
                error("subscribe", failure)
                return
        consumers = [start(*work) for work in consumers]
        producers = [
            start(self.produce, topic, k, rates[k], sys.maxsize) for k, topic in enumerate(topics)
        ]

        def report_stopped():
            for thread in producers:
                thread.join()
            emit(e="stopped")

        waiter = start(report_stopped)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            if line.strip() == "stop":
                self.producing.clear()
        self.producing.clear()
        waiter.join()
        self.running.clear()
        for thread in consumers:
            thread.join()


class Sub:
    """One subscription: name:type:ack:consumers."""

    def __init__(self, text):
        self.name, self.kind, ack, consumers = text.split(":")
        self.cumulative = ack == "cumulative"
        self.consumers = int(consumers)


class Outstanding:
    """Counts the sends that have no receipt yet."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = 0

    def add(self):
        with self.changed:
            self.count += 1

    def remove(self):
        with self.changed:
            self.count -= 1
            self.changed.notify_all()

    def wait(self):
        with self.changed:
            self.changed.wait_for(lambda: self.count == 0)

    def callback(self, n, k, payload):
        def done(result, _):
            if result == pulsar.Result.Ok:
                acked(n, k, payload)
            else:
                error("send", result, n)
            self.remove()

        return done


def acked(n, k, payload):
    say("a\t%d\t%d\t%d\t%d\n" % (n, micros(), zlib.crc32(payload), k))


def closing(what, thing):
    try:
        thing.close()
    except Exception as failure:
        error("close " + what, failure)


def start(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def boolean(text):
    return text == "true"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("mode", choices=["produce", "consume", "reader", "live"])
    for name in ("url", "read-url", "ca", "topic", "topics", "rates", "subs"):
        parser.add_argument("--" + name, default="")
    parser.add_argument("--from", dest="from_id", default="")
    parser.add_argument("--ack", default="individual", choices=["individual", "cumulative"])
    parser.add_argument("--sub", default="e2e")
    parser.add_argument("--type", default="exclusive", choices=sorted(TYPES))
    for name, value in (("count", 1), ("start", 0), ("rate", 0), ("size", 64), ("keys", 0), ("consumers", 1),
                        ("idle", 120000), ("linger", 300), ("skip", 0), ("lag", 0), ("from-time", 0), ("send-timeout", 0)):
        parser.add_argument("--" + name, type=int, default=value)
    for name, value in (("batch", True), ("sync", False), ("chunk", False), ("replicated", False),
                        ("reader", False), ("to-end", False), ("ids", False), ("pattern", False)):
        parser.add_argument("--" + name, type=boolean, default=value)
    args = parser.parse_args()
    start(flush_for_ever)
    driver = Driver(args)
    if args.mode == "produce":
        driver.produce(args.topic, 0, args.rate, args.count)
    else:
        {"consume": driver.consume, "reader": driver.read, "live": driver.live}[args.mode]()
    closing("client", driver.client)
    emit(e="done")
    OUT.flush()


if __name__ == "__main__":
    main()
