//! The Rust client (crate pulsar) behind the common command line of the client drivers (see ../../README.md).

mod events;
mod flags;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use futures::StreamExt;
use pulsar::consumer::{Consumer, InitialPosition, Message};
use pulsar::producer;
use pulsar::reader::Reader;
use pulsar::routing_policy::RoutingPolicy;
use pulsar::{ConsumerOptions, ProducerOptions, Pulsar, TokioExecutor};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use events::{Output, checksum, number_of, payload_of};
use flags::{Flags, Subscription};

type Client = Pulsar<TokioExecutor>;

/// Sends without a receipt at most.
const MAX_PENDING: u32 = 2000;

/// A wait for less is none: at high rates, waking up costs more than it brings.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// How long is waited for a message before a consumer looks whether it is to end.
const RECEIVE_WAIT: Duration = Duration::from_millis(100);

/// What all tasks share. Two flags end them: stop those that send, end those that receive.
struct Driver {
    flags: Flags,
    client: Client,
    out: Output,
    stop: watch::Sender<bool>,
    end: watch::Sender<bool>,
}

type Outcome = Result<(), (&'static str, String)>;

fn failed<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> (&'static str, String) {
    move |why| (what, why.to_string())
}

fn main() {
    log::set_logger(&StandardError).expect("the only logger");
    log::set_max_level(log::LevelFilter::Info);
    let (out, writer) = Output::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    if let Err((what, text)) = runtime.block_on(run(out.clone())) {
        out.error(what, -1, text);
    }
    runtime.shutdown_timeout(Duration::from_secs(1)); // what is dropped is closed by tasks
    out.done();
    let _ = writer.join();
}

async fn run(out: Output) -> Outcome {
    let mut args = std::env::args().skip(1);
    let mode = args.next().unwrap_or_default();
    let flags = Flags::parse(args).map_err(failed("flags"))?;
    let client = connect(&flags, flags.text("url")).await.map_err(failed("client"))?;
    let d = Arc::new(Driver { flags, client, out, stop: watch::Sender::new(false), end: watch::Sender::new(false) });
    match mode.as_str() {
        "produce" => {
            let (rate, count) = (d.flags.number("rate"), d.flags.number("count"));
            d.produce(d.flags.text("topic").to_string(), 0, rate.map_err(failed("flags"))?, count.map_err(failed("flags"))?).await;
            Ok(())
        }
        "consume" => consume(d).await,
        "reader" => {
            let tally = Tally::new(&d.flags)?;
            let reader = d.open_reader(&d.client, d.flags.text("topic"), 0).await?;
            d.read_all(reader, 0, Some(tally)).await;
            Ok(())
        }
        "live" => live(d).await,
        _ => Err(("flags", format!("unknown mode {mode:?}, want produce, consume, reader or live"))),
    }
}

async fn connect(flags: &Flags, url: &str) -> Result<Client, String> {
    let first = url.split(',').next().unwrap_or_default(); // the crate takes one host, and not a list
    let mut builder = Pulsar::builder(first, TokioExecutor);
    if !flags.text("ca").is_empty() {
        builder = builder.with_certificate_chain_file(flags.text("ca")).map_err(|e| e.to_string())?;
    }
    builder.build().await.map_err(|e| e.to_string())
}

async fn consume(d: Arc<Driver>) -> Outcome {
    let tally = Tally::new(&d.flags)?;
    let sub = d.flags.subscriptions().map_err(failed("flags"))?.swap_remove(0);
    let mut receiving = Vec::new();
    for c in 0..sub.consumers {
        match d.subscribe(&d.client, d.flags.text("topic"), 0, &sub, c).await {
            Ok(consumer) => receiving.push(d.spawn_receiving(consumer, 0, &sub, c, Some(tally.clone()))),
            Err((what, text)) => d.out.error(what, -1, text),
        }
    }
    all(receiving).await;
    Ok(())
}

async fn live(d: Arc<Driver>) -> Outcome {
    let subs = d.flags.subscriptions().map_err(failed("flags"))?;
    let rates = d.flags.rates().map_err(failed("flags"))?;
    let reading = match d.flags.text("read-url") {
        "" => d.client.clone(),
        url => connect(&d.flags, url).await.map_err(failed("client"))?,
    };
    let mut receiving = Vec::new();
    for (k, topic) in d.flags.topics().into_iter().enumerate() {
        for sub in &subs {
            for c in 0..sub.consumers {
                let consumer = d.subscribe(&reading, topic, k, sub, c).await?;
                receiving.push(d.spawn_receiving(consumer, k, sub, c, None));
            }
        }
        if d.flags.is("reader") {
            let reader = d.open_reader(&reading, topic, k).await?;
            let d = d.clone();
            receiving.push(tokio::spawn(async move { d.read_all(reader, k, None).await }));
        }
    }
    let mut producing = Vec::new();
    for (k, topic) in d.flags.topics().into_iter().enumerate() {
        let (d, topic, rate) = (d.clone(), topic.to_string(), rates[k]);
        producing.push(tokio::spawn(async move { d.produce(topic, k, rate, i64::MAX).await }));
    }
    let stopped = tokio::spawn({
        let d = d.clone();
        async move {
            all(producing).await;
            d.out.stopped();
        }
    });
    let listening = d.clone();
    let heard = tokio::task::spawn_blocking(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.as_str() {
                "stop" => listening.stop.send_replace(true),
                "quit" => break,
                _ => continue,
            };
        }
    });
    all(vec![heard]).await;
    d.stop.send_replace(true);
    all(vec![stopped]).await;
    d.end.send_replace(true);
    all(receiving).await;
    Ok(())
}

/// Waits for tasks; one that panicked ends the program as it would have in another driver.
async fn all(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.await.expect("a task of the driver panicked");
    }
}

impl Driver {
    async fn produce(&self, topic: String, k: usize, rate: i64, count: i64) {
        if let Err((what, text)) = self.try_produce(topic, k, rate, count).await {
            self.out.error(what, -1, text);
        }
    }

    async fn try_produce(&self, topic: String, k: usize, rate: i64, count: i64) -> Outcome {
        let keys: i64 = self.flags.number("keys").map_err(failed("flags"))?;
        let start: i64 = self.flags.number("start").map_err(failed("flags"))?;
        let size: usize = self.flags.number("size").map_err(failed("flags"))?;
        let batching = self.flags.is("batch") && keys == 0; // the crate has no batches by key
        let options = ProducerOptions {
            batch_size: batching.then_some(1000),
            batch_byte_size: batching.then_some(128 << 10),
            batch_timeout: batching.then_some(Duration::from_millis(1)),
            block_queue_if_full: true,
            routing_policy: Some(RoutingPolicy::RoundRobin), // by key, where there is one
            ..Default::default()
        };
        let building = self.client.producer().with_topic(topic).with_options(options).build();
        let mut producer = building.await.map_err(failed("producer"))?;
        self.out.ready("producer", k, 0);
        let pending = Arc::new(Semaphore::new(MAX_PENDING as usize));
        let mut stop = self.stop.subscribe();
        let began = Instant::now();
        for i in 0..count {
            if rate > 0 {
                let due = began + Duration::from_secs_f64(i as f64 / rate as f64);
                if due > Instant::now() + SHORTEST_WAIT {
                    let _ = timeout_at(due, stop.wait_for(|&stopped| stopped)).await;
                }
            }
            if *stop.borrow() {
                break;
            }
            let n = start + i;
            let payload = payload_of(n, size);
            let crc = checksum(&payload);
            let partition_key = (keys > 0).then(|| format!("key-{}", n % keys));
            let message = producer::Message { payload, partition_key, ..Default::default() };
            let permit = pending.clone().acquire_owned().await.expect("it is never closed");
            let receipt = match producer.send_non_blocking(message).await {
                Ok(receipt) => receipt,
                Err(e) => {
                    self.out.error("send", n, e);
                    continue;
                }
            };
            let out = self.out.clone();
            let answered = async move {
                match receipt.await {
                    Ok(_) => out.acked(n, k, crc),
                    Err(e) => out.error("send", n, e),
                }
                drop(permit);
            };
            if self.flags.is("sync") {
                answered.await;
            } else {
                tokio::spawn(answered);
            }
        }
        if batching {
            producer.send_batch().await.map_err(failed("flush"))?;
        }
        let _ = pending.acquire_many(MAX_PENDING).await; // until all have their receipts
        producer.close().await.map_err(failed("close producer"))
    }

    async fn subscribe(
        &self,
        client: &Client,
        topic: &str,
        k: usize,
        sub: &Subscription,
        c: usize,
    ) -> Result<Consumer<Vec<u8>, TokioExecutor>, (&'static str, String)> {
        let building = client
            .consumer()
            .with_topic(topic)
            .with_subscription(&sub.name)
            .with_subscription_type(sub.kind)
            .with_consumer_name(format!("consumer-{c}"))
            .with_options(ConsumerOptions::default().with_initial_position(InitialPosition::Earliest))
            .build();
        let consumer = building.await.map_err(failed("subscribe"))?;
        self.out.ready("consumer", k, c);
        Ok(consumer)
    }

    fn spawn_receiving(
        self: &Arc<Self>,
        consumer: Consumer<Vec<u8>, TokioExecutor>,
        k: usize,
        sub: &Subscription,
        c: usize,
        tally: Option<Arc<Tally>>,
    ) -> JoinHandle<()> {
        let (d, sub) = (self.clone(), sub.clone());
        tokio::spawn(async move {
            if let Err((what, text)) = d.receive_all(consumer, k, sub, c, tally).await {
                d.out.error(what, -1, text);
            }
        })
    }

    async fn receive_all(
        &self,
        mut consumer: Consumer<Vec<u8>, TokioExecutor>,
        k: usize,
        sub: Subscription,
        c: usize,
        tally: Option<Arc<Tally>>,
    ) -> Outcome {
        let skip: i64 = self.flags.number("skip").map_err(failed("flags"))?;
        let lag: usize = self.flags.number("lag").map_err(failed("flags"))?;
        let mut in_hand: VecDeque<Message<Vec<u8>>> = VecDeque::new();
        while self.goes_on(&tally) {
            let message = match timeout(RECEIVE_WAIT, consumer.next()).await {
                Err(_) => continue,
                Ok(None) => return Err(("receive", "the crate has ended the consumer".into())),
                Ok(Some(Err(e))) => return Err(("receive", e.to_string())),
                Ok(Some(Ok(message))) => message,
            };
            self.received(&message, k, c, &sub.name);
            if skip == 0 || number_of(&message.payload.data) % skip != 0 {
                in_hand.push_back(message);
            }
            self.acknowledge(&mut consumer, &mut in_hand, lag, sub.cumulative).await?;
            if let Some(tally) = &tally {
                tally.one();
            }
        }
        self.acknowledge(&mut consumer, &mut in_hand, 0, sub.cumulative).await?;
        consumer.close().await.map_err(failed("close consumer"))
    }

    /// Acknowledges the oldest messages until lag are left.
    async fn acknowledge(
        &self,
        consumer: &mut Consumer<Vec<u8>, TokioExecutor>,
        in_hand: &mut VecDeque<Message<Vec<u8>>>,
        lag: usize,
        cumulative: bool,
    ) -> Outcome {
        while in_hand.len() > lag {
            let message = in_hand.pop_front().expect("it is longer than lag");
            let acknowledged = match cumulative {
                true => consumer.cumulative_ack(&message).await,
                false => consumer.ack(&message).await,
            };
            acknowledged.map_err(failed("acknowledge"))?;
        }
        Ok(())
    }

    async fn open_reader(
        &self,
        client: &Client,
        topic: &str,
        k: usize,
    ) -> Result<Reader<Vec<u8>, TokioExecutor>, (&'static str, String)> {
        let options = ConsumerOptions::default().durable(false).with_initial_position(InitialPosition::Earliest);
        let reader = client.reader().with_topic(topic).with_options(options).into_reader().await.map_err(failed("reader"))?;
        self.out.ready("reader", k, 0);
        Ok(reader)
    }

    async fn read_all(&self, mut reader: Reader<Vec<u8>, TokioExecutor>, k: usize, tally: Option<Arc<Tally>>) {
        let name = if tally.is_none() { "reader" } else { "" };
        while self.goes_on(&tally) {
            match timeout(RECEIVE_WAIT, reader.next()).await {
                Err(_) => continue,
                Ok(None) => return self.out.error("read", -1, "the crate has ended the reader"),
                Ok(Some(Err(e))) => return self.out.error("read", -1, e),
                Ok(Some(Ok(message))) => self.received(&message, k, 0, name),
            }
            if let Some(tally) = &tally {
                tally.one();
            }
        }
    }

    fn received(&self, message: &Message<Vec<u8>>, k: usize, c: usize, s: &str) {
        self.out.received(&message.payload.data, &message.key().unwrap_or_default(), k, c, s);
    }

    fn goes_on(&self, tally: &Option<Arc<Tally>>) -> bool {
        !*self.end.borrow() && tally.as_ref().is_none_or(|tally| tally.goes_on())
    }
}

/// When a consume or reader run ends: after the wanted count and the linger, or when nothing comes any more.
struct Tally {
    want: i64,
    idle: Duration,
    linger: Duration,
    seen: Mutex<(i64, Instant)>, // how many, and when the last one came
}

impl Tally {
    fn new(flags: &Flags) -> Result<Arc<Tally>, (&'static str, String)> {
        let read = || -> Result<Tally, String> {
            Ok(Tally {
                want: flags.number("count")?,
                idle: Duration::from_millis(flags.number("idle")?),
                linger: Duration::from_millis(flags.number("linger")?),
                seen: Mutex::new((0, Instant::now())),
            })
        };
        read().map(Arc::new).map_err(failed("flags"))
    }

    fn one(&self) {
        let mut seen = self.seen.lock().expect("nobody panics with it");
        *seen = (seen.0 + 1, Instant::now());
    }

    fn goes_on(&self) -> bool {
        let (count, last) = *self.seen.lock().expect("nobody panics with it");
        last.elapsed() < if count >= self.want { self.linger } else { self.idle }
    }
}

/// The log of the crate goes to standard error.
struct StandardError;

impl log::Log for StandardError {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        eprintln!("{} {}: {}", record.level(), record.target(), record.args());
    }

    fn flush(&self) {}
}
