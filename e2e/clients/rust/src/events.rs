//! What the driver says: one line for each event, in the order in which it was said.

use std::io::Write;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

/// Checksum of payloads: CRC-32 as in zlib.
const CRC: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);

/// Output may be cloned, and used from any thread; a thread of its own writes.
#[derive(Clone)]
pub struct Output(Sender<Option<String>>);

impl Output {
    pub fn start() -> (Output, JoinHandle<()>) {
        let (lines, from) = channel();
        (Output(lines), std::thread::spawn(move || write_all(from)))
    }

    pub fn ready(&self, what: &str, k: usize, c: usize) {
        self.say(format!(r#"{{"e":"ready","what":"{what}","k":{k},"c":{c}}}"#));
    }

    pub fn acked(&self, n: i64, k: usize, crc: u32) {
        self.say(format!("a\t{n}\t{}\t{crc}\t{k}", micros()));
    }

    pub fn received(&self, payload: &[u8], key: &str, k: usize, c: usize, s: &str) {
        let (n, crc) = (number_of(payload), checksum(payload));
        self.say(format!("r\t{n}\t{}\t{crc}\t{k}\t{c}\t{s}\t{key}\t", micros()));
    }

    pub fn error(&self, what: &str, n: i64, text: impl std::fmt::Display) {
        let text = quoted(&text.to_string());
        self.say(format!(r#"{{"e":"error","what":"{what}","n":{n},"t":{:.3},"text":{text}}}"#, micros() as f64 / 1000.0));
    }

    pub fn stopped(&self) {
        self.say(r#"{"e":"stopped"}"#.into());
    }

    /// The last line; the writer ends with it.
    pub fn done(&self) {
        self.say(r#"{"e":"done"}"#.into());
        let _ = self.0.send(None);
    }

    fn say(&self, line: String) {
        let _ = self.0.send(Some(line)); // fails after done only
    }
}

fn write_all(from: Receiver<Option<String>>) {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    while let Ok(first) = from.recv() {
        let mut next = Some(first);
        while let Some(item) = next {
            let written = match item {
                Some(line) => writeln!(out, "{line}"),
                None => return, // what is left in the buffer is flushed when it is dropped
            };
            if written.is_err() {
                std::process::exit(1); // nobody reads any more
            }
            next = from.try_recv().ok();
        }
        let _ = out.flush();
    }
}

/// Since 1970.
fn micros() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock behind 1970").as_micros()
}

pub fn checksum(payload: &[u8]) -> u32 {
    CRC.checksum(payload)
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut json = String::with_capacity(text.len() + 2);
    json.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c < ' ' => json.push_str(&format!("\\u{:04x}", c as u32)),
            c => json.push(c),
        }
    }
    json.push('"');
    json
}

/// The number, a semicolon, then printable filler that differs from number to number.
pub fn payload_of(n: i64, size: usize) -> Vec<u8> {
    let mut payload = format!("{n};").into_bytes();
    payload.extend((payload.len()..size).map(|i| b' ' + ((n + i as i64) % 90) as u8));
    payload
}

/// Undoes payload_of; -1 for a payload that is not one.
pub fn number_of(payload: &[u8]) -> i64 {
    let head = payload.iter().take(24).position(|&b| b == b';').map(|end| &payload[..end]);
    head.and_then(|h| std::str::from_utf8(h).ok()?.parse().ok()).unwrap_or(-1)
}
