//! Leases: at most one holder per name, with a generation for fencing.
//!
//! Each new holder gets a greater generation, and no generation is issued twice: requests of an earlier holder are
//! recognized and rejected. A holder renews its lease every [`RENEW_INTERVAL`]; without a renewal it expires after
//! [`LEASE_TTL`], or at once if the holder's process on this host is dead.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Store;
use crate::clock;
pub use crate::contract::Holder;
use crate::proc::{self, ProcStat};

/// Lifetime of a lease without a renewal.
pub const LEASE_TTL: Duration = Duration::from_secs(5);
/// Interval between two renewals.
pub const RENEW_INTERVAL: Duration = Duration::from_millis(1500);
/// Maximum lifetime of a lease without a renewal, whatever its holder requests.
pub const MAX_TTL: Duration = Duration::from_secs(60);
/// Maximum generation: a greater number in a record or a request is forged. JSON numbers represent it exactly.
pub const MAX_GENERATION: u64 = 1 << 53;
/// The greatest generation that an administrator may set: far enough below [`MAX_GENERATION`] to never reach it.
pub const MAX_RESET: u64 = 1 << 52;
/// Maximum amount by which an agent's report may raise the next generation above the store's own number.
const MAX_STEP: u64 = 1 << 20;

impl Holder {
    /// This process.
    pub fn this(id: impl Into<String>) -> Holder {
        let pid = std::process::id();
        Holder {
            id: id.into(),
            host: proc::host_name(),
            boot_id: proc::boot_id().to_owned(),
            pid,
            started: started(pid).unwrap_or(0),
            machine: machine(),
            pids: proc::pid_namespace(),
            since: clock::now().0,
        }
    }

    /// Whether the holder is certainly dead. A holder on another host or in another PID namespace never is.
    pub fn is_dead(&self) -> bool {
        if self.host != proc::host_name() || self.pids == 0 || self.pids != proc::pid_namespace() {
            return false;
        }
        match self.boot_id == proc::boot_id() {
            true => started(self.pid) != Some(self.started),
            // Before the last boot, if it is the same machine.
            false => !self.machine.is_empty() && self.machine == machine(),
        }
    }

    /// Whether both are the same process with the same id.
    fn is(&self, other: &Holder) -> bool {
        let process = |holder: &Holder| (holder.pid, holder.started, holder.pids);
        self.id == other.id
            && self.host == other.host
            && self.boot_id == other.boot_id
            && process(self) == process(other)
    }
}

/// A lease that this process holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    pub name: String,
    pub holder: String,
    pub generation: u64,
}

/// Result of a lease request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAttempt {
    Acquired(Lease),
    /// Another holder has it. `left_ms`: time until it expires without a renewal.
    HeldByOther {
        holder: Holder,
        generation: u64,
        left_ms: u64,
    },
}

/// Stored state of a lease. A free lease keeps its generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub generation: u64,
    pub holder: Option<Holder>,
    /// Milliseconds since 1970.
    pub expires: i64,
    /// The greatest generation that an agent reported: the next one is above it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub floor: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Result of a lease reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// The lease is free. `generation`: the last one, which no holder has; the next holder gets a greater one.
    Free { generation: u64 },
    /// The lease is not free: its holder renews it.
    Renewed { holder: Holder, left_ms: u64 },
}

/// Result of an agent's report of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reported {
    /// Not above the stored generation.
    Known,
    /// The record to write.
    Raised(Record),
    /// Too far above the stored generation.
    OutOfBounds,
}

/// Reason why a generation is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// Another holder has taken the lease since.
    Older,
    /// No holder ever had this generation.
    NeverIssued,
    /// Its holder released the lease.
    Released,
}

impl Record {
    /// Checks a request's generation; `None`: valid. An expired lease that no other holder took is still valid.
    pub fn fences(record: Option<&Record>, generation: u64) -> Option<Fenced> {
        let last = record.map_or(0, Record::last);
        match (record, generation) {
            (_, 0) => Some(Fenced::NeverIssued),
            (Some(record), _) if generation == last && record.holder.is_some() => None,
            _ if generation == last => Some(Fenced::Released),
            _ if generation < last => Some(Fenced::Older),
            _ => Some(Fenced::NeverIssued),
        }
    }

    /// The last generation that was issued. A forged one counts as none.
    fn last(&self) -> u64 {
        if self.generation > MAX_GENERATION { 0 } else { self.generation }
    }

    fn next(&self) -> u64 {
        let floor = if self.floor > MAX_GENERATION { 0 } else { self.floor };
        self.last().max(floor).saturating_add(1)
    }

    /// Raises the next generation above one that an agent reported. The current holder keeps its own, so that one agent
    /// cannot stop the work on all other hosts.
    pub fn reported(self, generation: u64) -> Reported {
        let known = self.next() - 1;
        match generation {
            _ if generation <= known => Reported::Known,
            _ if generation > known.saturating_add(MAX_STEP).min(MAX_RESET) => Reported::OutOfBounds,
            _ => Reported::Raised(Record { floor: generation, ..self }),
        }
    }

    /// Frees a lease that its holder does not renew, or any lease with `force`. The next generation is above all issued
    /// ones, above those that agents reported, and above `above`.
    pub fn reset(current: Option<Record>, above: u64, force: bool, now: i64) -> Result<Record, Box<Record>> {
        let record = current.unwrap_or_default();
        if !force && record.is_renewed(now) {
            return Err(Box::new(record));
        }
        let generation = record.next().max(above.min(MAX_RESET).saturating_add(1));
        Ok(Record { generation, holder: None, expires: 0, floor: 0 })
    }

    /// Whether a live holder renews it. A lease that ends later than [`MAX_TTL`] from now is stuck.
    fn is_renewed(&self, now: i64) -> bool {
        let left = self.expires.saturating_sub(now);
        let alive = self.holder.as_ref().is_some_and(|holder| !holder.is_dead());
        alive && left > 0 && left <= ms(MAX_TTL)
    }

    /// Expiry of a lease that is taken or renewed now.
    pub fn ends(now: i64, lives: Duration) -> i64 {
        now.saturating_add(ms(lives.min(MAX_TTL)))
    }

    /// The record after this holder takes or renews the lease; `Err`: another holder has it.
    pub fn taken_by(
        current: Option<Record>,
        holder: &Holder,
        lives: Duration,
        now: i64,
    ) -> Result<Record, Box<Record>> {
        let record = current.unwrap_or_default();
        let expires = Record::ends(now, lives);
        match &record.holder {
            // A repeated request is a renewal.
            Some(other)
                if other.is(holder) && record.expires > now && record.generation <= MAX_GENERATION =>
            {
                Ok(Record { expires, holder: Some(holder.clone()), ..record })
            }
            Some(other) if record.expires > now && !other.is_dead() => Err(Box::new(record)),
            Some(_) | None => {
                let generation = record.next();
                Ok(Record { generation, holder: Some(holder.clone()), expires, floor: 0 })
            }
        }
    }
}

fn ms(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Cause of a lost lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseLost {
    /// No renewal succeeded within the lifetime: another process may hold the lease.
    Expired,
    TakenOver,
}

/// Renews a lease until it is lost.
pub async fn renew_until_lost<S: Store>(state: &S, lease: &Lease) -> LeaseLost {
    let mut until = Instant::now() + LEASE_TTL;
    loop {
        tokio::time::sleep_until((Instant::now() + RENEW_INTERVAL).min(until)).await;
        let asked = Instant::now();
        match tokio::time::timeout_at(until, state.renew_lease(lease, LEASE_TTL)).await {
            Ok(Ok(true)) => until = asked + LEASE_TTL,
            Ok(Ok(false)) => return LeaseLost::TakenOver,
            Ok(Err(_)) | Err(_) if Instant::now() < until => {}
            Ok(Err(_)) | Err(_) => return LeaseLost::Expired,
        }
    }
}

/// Digest of the machine id: the id itself is confidential.
fn machine() -> String {
    match proc::trimmed("/etc/machine-id") {
        id if id.is_empty() => id,
        id => blake3::hash(format!("abide lease {id}").as_bytes()).to_hex()[..16].to_owned(),
    }
}

/// Start time of a living process.
fn started(pid: u32) -> Option<u64> {
    ProcStat::of(pid).filter(ProcStat::is_alive).map(|stat| stat.started)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIVE: Duration = Duration::from_secs(5);

    fn holder(id: &str, pid: u32, started: u64) -> Holder {
        Holder { pid, started, ..Holder::this(id) }
    }

    #[test]
    fn a_lease_goes_to_one_and_its_number_only_grows() {
        let me = Holder::this("me");
        // Alive, and not us: the first process of the machine.
        let other = holder("other", 1, started(1).expect("there is a first process"));
        let first = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!((first.generation, first.expires), (1, 6000));
        assert_eq!(Record::taken_by(Some(first.clone()), &other, FIVE, 2000), Err(Box::new(first.clone())));
        let renewed = Record::taken_by(Some(first.clone()), &me, FIVE, 3000).expect("ours");
        assert_eq!((renewed.generation, renewed.expires), (1, 8000));
        let after = Record::taken_by(Some(renewed), &other, FIVE, 8000).expect("it expired");
        assert_eq!(after.generation, 2);
        let free = Record { holder: None, ..after };
        assert_eq!(Record::taken_by(Some(free), &me, FIVE, 9000).expect("released").generation, 3);
    }

    #[test]
    fn a_holder_that_is_provably_dead_is_replaced_at_once() {
        let me = Holder::this("me");
        for dead in [
            holder("gone", me.pid, me.started + 1),
            Holder { boot_id: "another boot".into(), ..holder("gone", 1, 0) },
            holder("gone", u32::MAX, 1),
        ] {
            assert!(dead.is_dead());
            let record = Record { generation: 7, holder: Some(dead), expires: i64::MAX, floor: 0 };
            assert_eq!(Record::taken_by(Some(record), &me, FIVE, 0).expect("dead").generation, 8);
        }
        assert!(!me.is_dead());
        // A holder on another machine, or in another container, is never certainly dead.
        let gone = holder("gone", u32::MAX, 1);
        for other in [
            Holder { host: "elsewhere".into(), ..gone.clone() },
            Holder { boot_id: "another boot".into(), machine: "another".into(), ..gone.clone() },
            Holder { boot_id: "another boot".into(), machine: String::new(), ..gone.clone() },
            Holder { pids: gone.pids + 1, ..gone.clone() },
        ] {
            assert!(!other.is_dead(), "{other:?}");
        }
        // A record of an earlier version, without the newer fields.
        let old = r#"{"id":"a","host":"h","boot_id":"b","pid":1,"started":1}"#;
        assert!(!serde_json::from_str::<Holder>(old).expect("it is read").is_dead());
    }

    #[test]
    fn another_process_with_the_same_name_is_another_holder() {
        let me = Holder::this("watch-1");
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert!(Record::taken_by(Some(held.clone()), &me, FIVE, 2000).is_ok());
        for other in [
            Holder { host: "elsewhere".into(), ..me.clone() },
            Holder { boot_id: "another".into(), ..me.clone() },
            Holder { pid: me.pid + 1, ..me.clone() },
            Holder { started: me.started + 1, ..me.clone() },
            Holder { pids: me.pids + 1, ..me.clone() },
        ] {
            assert_eq!(
                Record::taken_by(Some(held.clone()), &other, FIVE, 2000),
                Err(Box::new(held.clone())),
                "{other:?}"
            );
        }
    }

    #[test]
    fn a_generation_counts_while_the_lease_holds_it() {
        let (me, other) = (Holder::this("me"), Holder::this("other"));
        let fences = |record: &Record, generation| Record::fences(Some(record), generation);
        assert_eq!(Record::fences(None, 1), Some(Fenced::NeverIssued));
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(fences(&held, 1), None);
        for forged in [0, 2, MAX_GENERATION, u64::MAX] {
            assert_eq!(fences(&held, forged), Some(Fenced::NeverIssued), "{forged}");
        }
        // Expired, and no other holder took it: as before.
        let next = Record::taken_by(Some(held.clone()), &other, FIVE, 6000).expect("expired");
        assert_eq!((fences(&next, 1), fences(&next, 2)), (Some(Fenced::Older), None));
        let released = Record { holder: None, ..next };
        assert_eq!(fences(&released, 2), Some(Fenced::Released));
        // An earlier version took any number from a request.
        let forged = Record { generation: u64::MAX, ..released };
        assert_eq!(fences(&forged, u64::MAX), Some(Fenced::NeverIssued));
        assert_eq!(Record::taken_by(Some(forged), &me, FIVE, 9000).expect("free").generation, 1);
    }

    #[test]
    fn a_report_raises_the_next_generation_within_bounds() {
        let (me, other) = (Holder::this("me"), Holder::this("other"));
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(held.clone().reported(1), Reported::Known);
        for forged in [MAX_STEP + 2, MAX_RESET, MAX_GENERATION, u64::MAX] {
            assert_eq!(held.clone().reported(forged), Reported::OutOfBounds, "{forged}");
        }
        let Reported::Raised(raised) = held.reported(100) else { panic!("not raised") };
        assert_eq!(Record::fences(Some(&raised), 1), None, "the holder goes on");
        let renewed = Record::taken_by(Some(raised), &me, FIVE, 2000).expect("ours");
        assert_eq!((renewed.generation, renewed.floor), (1, 100));
        let next = Record::taken_by(Some(renewed), &other, FIVE, 9000).expect("expired");
        assert_eq!((next.generation, next.floor), (101, 0));
    }

    #[test]
    fn a_reset_frees_a_lease_and_never_gives_a_generation_twice() {
        let me = Holder::this("me");
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(Record::reset(Some(held.clone()), 0, false, 2000), Err(Box::new(held.clone())));
        let forced = Record::reset(Some(held.clone()), 0, true, 2000).expect("forced");
        assert_eq!((forced.generation, forced.holder.clone()), (2, None));
        assert_eq!(Record::fences(Some(&forced), 1), Some(Fenced::Older));
        // No live holder's lease ends in years: this one is stuck.
        let stuck = Record { expires: i64::MAX, floor: 40, ..held };
        assert_eq!(Record::reset(Some(stuck.clone()), 0, false, 2000).expect("stuck").generation, 41);
        let above = Record::reset(Some(stuck), 500, false, 2000).expect("stuck");
        assert_eq!(Record::taken_by(Some(above), &me, FIVE, 3000).expect("free").generation, 502);
        assert_eq!(Record::ends(0, Duration::from_secs(1 << 40)), 60_000);
    }
}
