import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Phaser;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;
import java.util.zip.CRC32;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerBuilder;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The Java client behind the common command line of the client drivers (see ../README.md). */
public final class Driver {
    /** How long a line may wait for more. */
    private static final int FLUSH_INTERVAL_MS = 5;
    private static final int BUFFER = 64 << 10;
    /** A wait for less is none: at high rates, waking up costs more than it brings. */
    private static final long SHORTEST_WAIT_NS = 1_000_000;
    private static final PrintStream OUT = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
    private static final StringBuilder LINES = new StringBuilder(); // guarded by itself

    private final Map<String, String> flags = new HashMap<>();
    private volatile boolean producing = true;
    private volatile boolean running = true;
    /** What standard input has said of transactions and the producer has not done yet. */
    private final Queue<String> wishes = new ConcurrentLinkedQueue<>();

    public static void main(String[] args) throws Exception {
        new Driver().run(args);
    }

    private void run(String[] args) throws Exception {
        String mode = args[0];
        Thread flusher = new Thread(() -> {
            for (;; LockSupport.parkNanos(TimeUnit.MILLISECONDS.toNanos(FLUSH_INTERVAL_MS))) {
                flush();
            }
        });
        flusher.setDaemon(true);
        flusher.start();
        for (int i = 1; i + 1 < args.length; i += 2) {
            flags.put(args[i].substring(2), args[i + 1]);
        }
        try {
            PulsarClient client = connect(flags.get("url"));
            switch (mode) {
                case "produce" -> produce(client, flags.get("topic"), 0, num("rate", 0), num("count", 1));
                case "consume" -> consume(client);
                case "reader" -> read(client);
                case "live" -> live(client);
                default -> throw new IllegalArgumentException("unknown mode " + mode);
            }
        } catch (PulsarClientException e) {
            error("client", -1, e);
        }
        emit("{\"e\":\"done\"}");
        flush();
        // Producers and consumers are closed; closing the client as well would only wait 2 s for its event loops.
        System.exit(0);
    }

    private PulsarClient connect(String url) throws PulsarClientException {
        ClientBuilder builder = PulsarClient.builder().serviceUrl(url).enableTransaction(bool("transactions", false));
        if (flags.containsKey("ca")) {
            builder.tlsTrustCertsFilePath(flags.get("ca")).enableTlsHostnameVerification(true).allowTlsInsecureConnection(false);
        }
        return builder.build();
    }

    // ---- producing

    private void produce(PulsarClient client, String topic, int k, long rate, long count) throws InterruptedException {
        boolean chunk = bool("chunk", false);
        boolean batch = bool("batch", true) && !chunk;
        long keys = num("keys", 0);
        ProducerBuilder<byte[]> builder = client.newProducer().topic(topic).blockIfQueueFull(true)
                .maxPendingMessages(2000).enableBatching(batch).enableChunking(chunk);
        if (flags.containsKey("chunk-size")) {
            builder.chunkMaxMessageSize((int) num("chunk-size", 0));
        }
        if (flags.containsKey("send-timeout")) {
            builder.sendTimeout((int) num("send-timeout", 0), TimeUnit.MILLISECONDS);
        }
        if (bool("transactions", false)) {
            builder.sendTimeout(0, TimeUnit.SECONDS); // as the library wants it
        }
        if (batch && keys > 0) {
            builder.batcherBuilder(BatcherBuilder.KEY_BASED);
        }
        Producer<byte[]> producer;
        try {
            producer = builder.create();
        } catch (PulsarClientException e) {
            error("producer", -1, e);
            return;
        }
        emit("{\"e\":\"ready\",\"what\":\"producer\",\"k\":" + k + "}");
        boolean sync = bool("sync", false);
        int size = (int) num("size", 64);
        Phaser outstanding = new Phaser(1);
        long began = System.nanoTime();
        long first = num("start", 0);
        InTransaction open = null;
        for (long i = 0; i < count && producing; i++) {
            if (rate > 0) {
                pace(began + i * 1_000_000_000L / rate);
            }
            long n = first + i;
            byte[] payload = payload(n, size);
            String wish = wishes.poll();
            if (wish != null) {
                try {
                    producer.flush(); // the library puts messages of no transaction into the batch of one
                    if (wish.equals("begin")) {
                        open = InTransaction.send(client, producer, n, payload);
                        emit("{\"e\":\"ready\",\"what\":\"transaction\",\"n\":" + n + "}");
                        continue;
                    }
                    open.end(wish, k);
                } catch (PulsarClientException | ExecutionException e) {
                    error(wish, n, e);
                }
            }
            TypedMessageBuilder<byte[]> message = producer.newMessage().value(payload);
            if (keys > 0) {
                message.key("key-" + n % keys);
            }
            if (sync) {
                try {
                    message.send();
                    acked(n, k, payload);
                } catch (PulsarClientException e) {
                    error("send", n, e);
                }
                continue;
            }
            // A Phaser holds at most 65,535 parties; the producer's own limit of pending messages is far below.
            outstanding.register();
            message.sendAsync().whenComplete((id, failure) -> {
                if (failure != null) {
                    error("send", n, failure);
                } else {
                    acked(n, k, payload);
                }
                outstanding.arriveAndDeregister();
            });
        }
        try {
            producer.flush();
        } catch (PulsarClientException e) {
            error("flush", -1, e);
        }
        outstanding.arriveAndAwaitAdvance();
        closing("producer", producer::close);
    }

    /** A message of a transaction of its own. It has its receipt when that is committed, and none when it is aborted. */
    private record InTransaction(Transaction transaction, long n, byte[] payload) {
        static InTransaction send(PulsarClient client, Producer<byte[]> producer, long n, byte[] payload)
                throws PulsarClientException, ExecutionException, InterruptedException {
            Transaction transaction = client.newTransaction().withTransactionTimeout(10, TimeUnit.MINUTES).build().get();
            producer.newMessage(transaction).value(payload).send();
            return new InTransaction(transaction, n, payload);
        }

        void end(String how, int k) throws ExecutionException, InterruptedException {
            if (how.equals("commit")) {
                transaction.commit().get();
                acked(n, k, payload);
            } else {
                transaction.abort().get();
            }
            emit("{\"e\":\"ready\",\"what\":\"" + how + "\",\"n\":" + n + "}");
        }
    }

    private static void acked(long n, int k, byte[] payload) {
        long crc = crc(payload);
        synchronized (LINES) {
            LINES.append("a\t").append(n).append('\t').append(micros()).append('\t').append(crc).append('\t').append(k);
            endLine();
        }
    }

    private void pace(long due) {
        for (long wait = due - System.nanoTime(); wait >= SHORTEST_WAIT_NS && producing; wait = due - System.nanoTime()) {
            LockSupport.parkNanos(wait);
        }
    }

    // ---- consuming

    /** One subscription: name:type:ack:consumers. */
    private record Sub(String name, String kind, boolean cumulative, int consumers) {
        static Sub parse(String text) {
            String[] parts = text.split(":");
            return new Sub(parts[0], parts[1], parts[2].equals("cumulative"), Integer.parseInt(parts[3]));
        }
    }

    private List<Sub> subs() {
        String one = flags.getOrDefault("sub", "e2e") + ":" + flags.getOrDefault("type", "exclusive") + ":"
                + flags.getOrDefault("ack", "individual") + ":" + num("consumers", 1);
        List<Sub> subs = new ArrayList<>();
        for (String text : flags.getOrDefault("subs", one).split(",")) {
            subs.add(Sub.parse(text));
        }
        return subs;
    }

    private Consumer<byte[]> subscribe(PulsarClient client, String topic, int k, Sub sub, int c) throws PulsarClientException {
        SubscriptionType type = switch (sub.kind()) {
            case "shared" -> SubscriptionType.Shared;
            case "failover" -> SubscriptionType.Failover;
            case "key_shared" -> SubscriptionType.Key_Shared;
            default -> SubscriptionType.Exclusive;
        };
        ConsumerBuilder<byte[]> builder = client.newConsumer()
                .subscriptionName(sub.name()).subscriptionType(type)
                .consumerName("consumer-" + c).replicateSubscriptionState(bool("replicated", false))
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
        if (bool("pattern", false)) {
            builder.topicsPattern(topic);
        } else {
            builder.topic(topic.split(","));
        }
        Consumer<byte[]> consumer = builder.subscribe();
        if (flags.containsKey("from")) {
            consumer.seek(storedId());
        }
        if (flags.containsKey("from-time")) {
            consumer.seek(num("from-time", 0));
        }
        emit("{\"e\":\"ready\",\"what\":\"consumer\",\"k\":" + k + ",\"c\":" + c + "}");
        return consumer;
    }

    /** The id of --from. */
    private MessageId storedId() throws PulsarClientException {
        try {
            return MessageId.fromByteArray(Base64.getDecoder().decode(flags.get("from")));
        } catch (IOException e) {
            throw new PulsarClientException(e);
        }
    }

    private void consume(PulsarClient client) throws InterruptedException {
        Tally tally = new Tally();
        Sub sub = subs().get(0);
        List<Thread> threads = new ArrayList<>();
        for (int c = 0; c < sub.consumers(); c++) {
            Consumer<byte[]> consumer;
            try {
                consumer = subscribe(client, flags.get("topic"), 0, sub, c);
            } catch (PulsarClientException e) {
                error("subscribe", -1, e);
                continue;
            }
            final int index = c;
            Thread thread = new Thread(() -> {
                receiveAll(consumer, 0, sub, index, tally);
                closing("consumer", consumer::close);
            });
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) {
            thread.join();
        }
    }

    private void receiveAll(Consumer<byte[]> consumer, int k, Sub sub, int c, Tally tally) {
        long skip = num("skip", 0);
        long lag = num("lag", 0);
        ArrayDeque<Message<byte[]>> inHand = new ArrayDeque<>();
        while (running && (tally == null || tally.goesOn())) {
            try {
                Message<byte[]> message = consumer.receive(100, TimeUnit.MILLISECONDS);
                if (message == null) {
                    continue;
                }
                received(message, k, sub.name(), c);
                if (skip == 0 || number(message.getData()) % skip != 0) {
                    inHand.add(message);
                }
                while (inHand.size() > lag) {
                    acknowledge(consumer, inHand.remove(), sub.cumulative());
                }
                if (tally != null) {
                    tally.one();
                }
            } catch (PulsarClientException e) {
                error("receive", -1, e);
                return;
            }
        }
        while (!inHand.isEmpty()) {
            acknowledge(consumer, inHand.remove(), sub.cumulative());
        }
    }

    private static void acknowledge(Consumer<byte[]> consumer, Message<byte[]> message, boolean cumulative) {
        CompletableFuture<Void> done = cumulative ? consumer.acknowledgeCumulativeAsync(message) : consumer.acknowledgeAsync(message);
        done.exceptionally(e -> {
            error("acknowledge", -1, e);
            return null;
        });
    }

    private Reader<byte[]> openReader(PulsarClient client, String topic, int k) throws PulsarClientException {
        MessageId from = flags.containsKey("from") ? storedId() : MessageId.earliest;
        Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(from).create();
        if (flags.containsKey("from-time")) {
            reader.seek(num("from-time", 0));
        }
        emit("{\"e\":\"ready\",\"what\":\"reader\",\"k\":" + k + "}");
        return reader;
    }

    private void read(PulsarClient client) {
        try {
            Reader<byte[]> reader = openReader(client, flags.get("topic"), 0);
            if (bool("to-end", false)) {
                while (reader.hasMessageAvailable()) {
                    received(reader.readNext(), 0, "", 0);
                }
            } else {
                readAll(reader, 0, new Tally());
            }
            closing("reader", reader::close);
        } catch (PulsarClientException e) {
            error("reader", -1, e);
        }
    }

    private void readAll(Reader<byte[]> reader, int k, Tally tally) {
        while (running && (tally == null || tally.goesOn())) {
            try {
                Message<byte[]> message = reader.readNext(100, TimeUnit.MILLISECONDS);
                if (message != null) {
                    received(message, k, tally == null ? "reader" : "", 0);
                    if (tally != null) {
                        tally.one();
                    }
                }
            } catch (PulsarClientException e) {
                error("read", -1, e);
                return;
            }
        }
    }

    private void received(Message<byte[]> message, int k, String sub, int c) {
        byte[] payload = message.getData();
        String stored = bool("ids", false) ? Base64.getEncoder().encodeToString(message.getMessageId().toByteArray()) : "";
        long crc = crc(payload);
        synchronized (LINES) {
            LINES.append("r\t").append(number(payload)).append('\t').append(micros()).append('\t').append(crc).append('\t').append(k).append('\t').append(c)
                    .append('\t').append(sub).append('\t').append(message.hasKey() ? message.getKey() : "").append('\t').append(stored);
            endLine();
        }
    }

    /** When a consume or reader run ends: after the wanted count and the linger, or when nothing comes any more. */
    private final class Tally {
        private final long want = num("count", 1);
        private final long idle = TimeUnit.MILLISECONDS.toNanos(num("idle", 120_000));
        private final long linger = TimeUnit.MILLISECONDS.toNanos(num("linger", 300));
        private long seen;
        private long last = System.nanoTime();

        synchronized void one() {
            seen++;
            last = System.nanoTime();
        }

        synchronized boolean goesOn() {
            return System.nanoTime() - last < (seen >= want ? linger : idle);
        }
    }

    // ---- live

    private void live(PulsarClient client) throws InterruptedException, IOException {
        String[] topics = flags.get("topics").split(",");
        String[] rates = flags.get("rates").split(",");
        PulsarClient reading = flags.containsKey("read-url") ? connect(flags.get("read-url")) : client;
        List<Thread> consumers = new ArrayList<>();
        List<Thread> producers = new ArrayList<>();
        try {
            for (int k = 0; k < topics.length; k++) {
                final int index = k;
                for (Sub sub : subs()) {
                    for (int c = 0; c < sub.consumers(); c++) {
                        final int which = c;
                        Consumer<byte[]> consumer = subscribe(reading, topics[k], k, sub, c);
                        consumers.add(new Thread(() -> {
                            receiveAll(consumer, index, sub, which, null);
                            closing("consumer", consumer::close);
                        }));
                    }
                }
                if (bool("reader", false)) {
                    Reader<byte[]> reader = openReader(reading, topics[k], k);
                    consumers.add(new Thread(() -> {
                        readAll(reader, index, null);
                        closing("reader", reader::close);
                    }));
                }
            }
        } catch (PulsarClientException e) {
            error("subscribe", -1, e);
            return;
        }
        consumers.forEach(Thread::start);
        for (int k = 0; k < topics.length; k++) {
            final int index = k;
            Thread thread = new Thread(() -> {
                try {
                    produce(client, topics[index], index, Long.parseLong(rates[index]), Long.MAX_VALUE);
                } catch (InterruptedException e) {
                    Thread.currentThread().interrupt();
                }
            });
            thread.start();
            producers.add(thread);
        }
        CountDownLatch stopped = new CountDownLatch(1);
        Thread waiter = new Thread(() -> {
            for (Thread thread : producers) {
                try {
                    thread.join();
                } catch (InterruptedException e) {
                    Thread.currentThread().interrupt();
                }
            }
            emit("{\"e\":\"stopped\"}");
            stopped.countDown();
        });
        waiter.start();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null && !line.equals("quit"); line = in.readLine()) {
            switch (line) {
                case "stop" -> producing = false;
                case "begin", "commit", "abort" -> wishes.add(line);
                default -> error("standard input", -1, new IllegalArgumentException(line));
            }
        }
        producing = false;
        stopped.await();
        running = false;
        for (Thread thread : consumers) {
            thread.join();
        }
    }

    // ---- small things

    private long num(String flag, long byDefault) {
        return flags.containsKey(flag) ? Long.parseLong(flags.get(flag)) : byDefault;
    }

    private boolean bool(String flag, boolean byDefault) {
        return flags.containsKey(flag) ? Boolean.parseBoolean(flags.get(flag)) : byDefault;
    }

    /** The number, a semicolon, then printable filler that differs from number to number. */
    private static byte[] payload(long n, int size) {
        byte[] head = (n + ";").getBytes(StandardCharsets.US_ASCII);
        byte[] payload = new byte[Math.max(size, head.length)];
        System.arraycopy(head, 0, payload, 0, head.length);
        for (int i = head.length; i < payload.length; i++) {
            payload[i] = (byte) (' ' + (n + i) % 90);
        }
        return payload;
    }

    private static long number(byte[] payload) {
        long n = 0;
        int i = 0;
        for (; i < payload.length && payload[i] >= '0' && payload[i] <= '9'; i++) {
            n = n * 10 + payload[i] - '0';
        }
        return i > 0 && i < payload.length && payload[i] == ';' ? n : -1;
    }

    private static long crc(byte[] payload) {
        CRC32 crc = new CRC32();
        crc.update(payload);
        return crc.getValue();
    }

    /** Since 1970. */
    private static long micros() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    private interface Closer {
        void close() throws IOException; // PulsarClientException is one
    }

    private static void closing(String what, Closer closer) {
        try {
            closer.close();
        } catch (IOException e) {
            error("close " + what, -1, e);
        }
    }

    private static void error(String what, long n, Throwable failure) {
        emit("{\"e\":\"error\",\"what\":" + quote(what) + ",\"n\":" + n + ",\"t\":" + micros() / 1000.0
                + ",\"text\":" + quote(String.valueOf(failure)) + "}");
    }

    private static String quote(String s) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char ch : s.toCharArray()) {
            if (ch == '"' || ch == '\\') {
                quoted.append('\\').append(ch);
            } else if (ch < ' ') {
                quoted.append(String.format("\\u%04x", (int) ch));
            } else {
                quoted.append(ch);
            }
        }
        return quoted.append('"').toString();
    }

    private static void emit(String line) {
        synchronized (LINES) {
            LINES.append(line);
            endLine();
        }
    }

    /** With the lock of LINES. */
    private static void endLine() {
        LINES.append('\n');
        if (LINES.length() > BUFFER) {
            flush();
        }
    }

    private static void flush() {
        synchronized (LINES) {
            if (LINES.length() > 0) {
                OUT.append(LINES);
                OUT.flush();
                LINES.setLength(0);
            }
        }
    }
}
