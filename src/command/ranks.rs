//! The ranks of one job side by side: sums, imbalance, the rank nearest its limit, and ranks that ran out of
//! memory.

use serde_json::{Value, json};

/// One device of one rank. Sizes are in bytes.
struct Share {
    rank: u64,
    device: i64,
    allocated: u64,
    reserved: u64,
    limit: Option<u64>,
    ooms: u64,
}

/// What the ranks of a job used. There are at least two, all different.
pub struct Ranks(Vec<Share>);

impl Ranks {
    /// The ranks that these statistics come from; `None` where they are not those of several ranks, each
    /// once.
    pub fn of<'a>(processes: impl Iterator<Item = &'a Value>) -> Option<Ranks> {
        let mut ranks = Vec::new();
        let mut shares = Vec::new();
        for process in processes {
            let devices = process["devices"].as_array().map_or(&[][..], Vec::as_slice);
            let Some(rank) = process["rank"].as_u64().filter(|_| !devices.is_empty()) else {
                continue;
            };
            if ranks.contains(&rank) {
                return None;
            }
            ranks.push(rank);
            shares.extend(devices.iter().filter_map(|it| share(rank, it)));
        }
        shares.sort_by_key(|it| (it.rank, it.device));
        (ranks.len() > 1 && shares.len() > 1).then_some(Ranks(shares))
    }

    /// A few lines for people.
    pub fn text(&self) -> String {
        let Ranks(shares) = self;
        let (most, least) = self.extremes();
        let sum = |of: fn(&Share) -> u64| gibibytes(shares.iter().map(of).sum());
        let mut text = format!(
            "{} ranks: {} in use at their peaks, {} held\n",
            self.count(),
            sum(|it| it.allocated),
            sum(|it| it.reserved),
        );
        text += &match most.allocated.checked_div(least.allocated) {
            Some(_) => format!(
                "most in use: rank {} with {}, {:.2} times as much as rank {} with {}, which has least\n",
                most.rank,
                gibibytes(most.allocated),
                most.allocated as f64 / least.allocated as f64,
                least.rank,
                gibibytes(least.allocated),
            ),
            None => format!(
                "most in use: rank {} with {}; rank {} used none\n",
                most.rank,
                gibibytes(most.allocated),
                least.rank
            ),
        };
        if let Some((rank, share, limit)) = self.nearest() {
            text += &format!(
                "nearest to its limit: rank {rank}, which held {:.1} % of {}\n",
                100.0 * share,
                gibibytes(limit)
            );
        }
        for it in shares.iter().filter(|it| it.ooms > 0) {
            let times = if it.ooms == 1 {
                "once"
            } else {
                &format!("{} times", it.ooms)
            };
            text += &format!("OUT OF MEMORY: rank {}, {times}\n", it.rank);
        }
        text
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let Ranks(shares) = self;
        let (most, least) = self.extremes();
        let extreme = |it: &Share| json!({"rank": it.rank, "device": it.device, "peak_allocated_bytes": it.allocated});
        let ooms = shares.iter().filter(|it| it.ooms > 0);
        json!({
            "count": self.count(),
            "peak_allocated_bytes": shares.iter().map(|it| it.allocated).sum::<u64>(),
            "peak_reserved_bytes": shares.iter().map(|it| it.reserved).sum::<u64>(),
            "most_allocated": extreme(most),
            "least_allocated": extreme(least),
            "nearest_to_limit": self.nearest().map(|(rank, share, limit)| {
                json!({"rank": rank, "limit_bytes": limit, "peak_reserved_share": share})
            }),
            "out_of_memory": ooms
                .map(|it| json!({"rank": it.rank, "num_ooms": it.ooms}))
                .collect::<Vec<_>>(),
        })
    }

    fn count(&self) -> usize {
        let mut ranks: Vec<_> = self.0.iter().map(|it| it.rank).collect();
        ranks.dedup();
        ranks.len()
    }

    /// Which had most in use at its peak, and which least; the first of several.
    fn extremes(&self) -> (&Share, &Share) {
        let mut most = &self.0[0];
        let mut least = most;
        for it in &self.0[1..] {
            if it.allocated > most.allocated {
                most = it;
            }
            if it.allocated < least.allocated {
                least = it;
            }
        }
        (most, least)
    }

    /// The rank that held the largest part of its limit at its peak, that part, and the limit.
    fn nearest(&self) -> Option<(u64, f64, u64)> {
        let with_limits = self.0.iter().filter_map(|it| {
            let limit = it.limit.filter(|limit| *limit > 0)?;
            Some((it.rank, it.reserved as f64 / limit as f64, limit))
        });
        with_limits.reduce(|a, b| if b.1 > a.1 { b } else { a })
    }
}

fn share(rank: u64, device: &Value) -> Option<Share> {
    let counter = |of: &str, name: &str| device[of][name].as_u64();
    let others = counter("other_libraries", "allocated_bytes.all.peak").unwrap_or(0);
    Some(Share {
        rank,
        device: device["device"].as_i64()?,
        allocated: counter("memory_stats", "allocated_bytes.all.peak")?.saturating_add(others),
        reserved: counter("memory_stats", "reserved_bytes.all.peak")?,
        limit: device["limit_bytes"].as_u64(),
        ooms: counter("memory_stats", "num_ooms").unwrap_or(0),
    })
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}
