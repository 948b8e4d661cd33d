//! The command line of the client drivers, as far as this client can do what it asks for.

use std::collections::HashMap;

use pulsar::SubType;

/// Flags with the values that they have when they are not given.
const DEFAULTS: [(&str, &str); 25] = [
    ("url", ""),
    ("read-url", ""),
    ("ca", ""),
    ("topic", ""),
    ("topics", ""),
    ("rates", ""),
    ("count", "1"),
    ("start", "0"),
    ("rate", "0"),
    ("batch", "true"),
    ("sync", "false"),
    ("size", "64"),
    ("keys", "0"),
    ("sub", "e2e"),
    ("type", "exclusive"),
    ("ack", "individual"),
    ("subs", ""),
    ("consumers", "1"),
    ("skip", "0"),
    ("lag", "0"),
    ("reader", "false"),
    ("idle", "120000"),
    ("linger", "300"),
    ("chunk", "false"),
    ("replicated", "false"),
];

/// Flags that the other drivers have, and the crate has nothing for.
const CANNOT: [(&str, &str); 5] = [
    ("chunk-size", "the crate does not chunk messages"),
    ("chunk", "the crate does not chunk messages"),
    ("replicated", "the crate cannot ask for a replicated subscription"),
    ("from", "the crate does not tell messages of a batch apart where it begins"),
    ("to-end", "the crate's reader does not know whether there is a message"),
];

pub struct Flags(HashMap<String, String>);

impl Flags {
    /// Reads pairs of --flag and value.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Flags, String> {
        let mut all: HashMap<String, String> =
            DEFAULTS.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let args: Vec<String> = args.collect();
        for pair in args.chunks(2) {
            let (name, value) = match pair {
                [flag, value] if flag.starts_with("--") => (&flag[2..], value),
                _ => return Err(format!("{pair:?}, want --flag value")),
            };
            if let Some((_, why)) = CANNOT.iter().find(|(cannot, _)| *cannot == name && value != "false") {
                return Err(format!("--{name} {value}: {why}"));
            }
            if all.insert(name.to_string(), value.clone()).is_none() && value != "false" {
                return Err(format!("unknown flag --{name}"));
            }
        }
        Ok(Flags(all))
    }

    /// The text of one of DEFAULTS.
    pub fn text(&self, name: &str) -> &str {
        &self.0[name]
    }

    pub fn is(&self, name: &str) -> bool {
        self.text(name) == "true"
    }

    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T, String> {
        number(self.text(name), name)
    }

    pub fn topics(&self) -> Vec<&str> {
        self.text("topics").split(',').collect()
    }

    pub fn rates(&self) -> Result<Vec<i64>, String> {
        self.text("rates").split(',').map(|rate| number(rate, "rates")).collect()
    }

    pub fn subscriptions(&self) -> Result<Vec<Subscription>, String> {
        let one = ["sub", "type", "ack", "consumers"].map(|name| self.text(name)).join(":");
        let all = match self.text("subs") {
            "" => &one,
            several => several,
        };
        all.split(',').map(Subscription::parse).collect()
    }
}

fn number<T: std::str::FromStr>(text: &str, name: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("--{name} {text}: not a number of its kind"))
}

/// One subscription: name:type:ack:consumers.
#[derive(Clone)]
pub struct Subscription {
    pub name: String,
    pub kind: SubType,
    pub cumulative: bool,
    pub consumers: usize,
}

impl Subscription {
    fn parse(text: &str) -> Result<Subscription, String> {
        let [name, kind, ack, consumers] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(format!("subscription {text:?}, want name:type:ack:consumers"));
        };
        let kind = match kind {
            "exclusive" => SubType::Exclusive,
            "shared" => SubType::Shared,
            "failover" => SubType::Failover,
            "key_shared" => SubType::KeyShared,
            _ => return Err(format!("unknown subscription type {kind:?}")),
        };
        Ok(Subscription { name: name.into(), kind, cumulative: ack == "cumulative", consumers: number(consumers, "consumers")? })
    }
}
