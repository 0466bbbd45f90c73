//! Leases: who may act, and under which number. A number is never given twice, so whoever carries an older one can be
//! told to look again.

use serde::{Deserialize, Serialize};

/// Who asks for a lease: enough to prove that a holder on this machine is dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Different for every process that asks.
    pub id: String,
    pub host: String,
    /// Of the running kernel: after a reboot nobody from before is alive.
    pub boot_id: String,
    pub pid: u32,
    /// When the process began, in ticks of the kernel: a pid alone may be somebody else's by now.
    pub started: u64,
    /// When it first asked, in milliseconds since 1970, for whoever waits for it.
    #[serde(default)]
    pub since: i64,
}

impl Holder {
    /// This process.
    pub fn this(id: impl Into<String>) -> Holder {
        let pid = std::process::id();
        Holder {
            id: id.into(),
            host: host_name(),
            boot_id: boot_id(),
            pid,
            started: started(pid).unwrap_or(0),
            since: now_ms(),
        }
    }

    /// Is it certain that this holder is gone? Of another machine nothing is certain.
    pub fn is_dead(&self) -> bool {
        if self.host != host_name() {
            return false;
        }
        self.boot_id != boot_id() || started(self.pid) != Some(self.started)
    }
}

/// A lease that is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    pub name: String,
    pub holder: String,
    pub generation: u64,
}

/// What became of asking for a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    Ours(Lease),
    /// Somebody has it; `left_ms`: for that much longer, unless it is renewed.
    Theirs {
        holder: Holder,
        generation: u64,
        left_ms: u64,
    },
}

/// What is kept of a lease. A lease that nobody holds keeps its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub generation: u64,
    pub holder: Option<Holder>,
    /// Milliseconds since 1970.
    pub expires: i64,
}

impl Record {
    /// May this holder have it now? With the record as it is then.
    pub fn taken_by(
        current: Option<Record>,
        holder: &Holder,
        lives_ms: i64,
        now: i64,
    ) -> Result<Record, Record> {
        let expires = now.saturating_add(lives_ms);
        let next = |generation: u64| Record { generation, holder: Some(holder.clone()), expires };
        let Some(record) = current else { return Ok(next(1)) };
        match &record.holder {
            // Asking again is renewing.
            Some(other) if other.id == holder.id && record.expires > now => Ok(next(record.generation)),
            Some(other) if record.expires > now && !other.is_dead() => Err(record),
            Some(_) | None => Ok(next(record.generation.saturating_add(1))),
        }
    }
}

pub(super) fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn host_name() -> String {
    read("/proc/sys/kernel/hostname")
}

fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id")
}

fn read(file: &str) -> String {
    std::fs::read_to_string(file).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// The 22nd field of /proc/PID/stat; the second, a name in parentheses, may contain anything.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    // A zombie is dead.
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(id: &str, pid: u32, started: u64) -> Holder {
        Holder { pid, started, ..Holder::this(id) }
    }

    #[test]
    fn a_lease_goes_to_one_and_its_number_only_grows() {
        let me = Holder::this("me");
        // Alive, and not us: the first process of the machine.
        let other = holder("other", 1, started(1).expect("there is a first process"));
        let first = Record::taken_by(None, &me, 5000, 1000).expect("free");
        assert_eq!((first.generation, first.expires), (1, 6000));
        assert_eq!(Record::taken_by(Some(first.clone()), &other, 5000, 2000), Err(first.clone()));
        let renewed = Record::taken_by(Some(first.clone()), &me, 5000, 3000).expect("ours");
        assert_eq!((renewed.generation, renewed.expires), (1, 8000));
        let after = Record::taken_by(Some(renewed), &other, 5000, 8000).expect("it expired");
        assert_eq!(after.generation, 2);
        let free = Record { holder: None, ..after };
        assert_eq!(Record::taken_by(Some(free), &me, 5000, 9000).expect("released").generation, 3);
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
            let record = Record { generation: 7, holder: Some(dead), expires: i64::MAX };
            assert_eq!(Record::taken_by(Some(record), &me, 5000, 0).expect("dead").generation, 8);
        }
        assert!(!me.is_dead());
        assert!(
            !Holder { host: "elsewhere".into(), pid: 0, ..me }.is_dead(),
            "of another machine nothing is certain"
        );
    }
}
