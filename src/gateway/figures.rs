//! Figures of processes: the newest batch of each agent, in memory, and queries for the last hour.
//!
//! Figures are never stored, so they wake no watch and change no row's number. They belong to the session that sent them:
//! they count while its stream is open, and are dropped with it. Their bytes are bounded per session and in total.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{ApiError, Gateway};
use crate::agent_protocol::{
    FigurePoint, FigureRow, FiguresAnswer, FiguresUpdate, ToAgent, TreeFigures, rounded_percent,
};
use crate::clock;
use crate::contract::{FigureDetails, FigureSample, FigureSeries};
use crate::gse::response::Envelope;
use crate::ids::fresh_id;
use crate::model::{HostKey, InstanceKey, Time};
use crate::store::Store;

/// Maximum bytes of one session's rows, and of those of all sessions. Rows beyond are ignored.
const MAX_SESSION_BYTES: usize = 64 << 20;
const MAX_BYTES: usize = 512 << 20;
/// Bytes counted for a row in addition to the text of its key.
const ROW_BYTES: usize = 256;
/// Maximum queries that wait for an agent, and their timeout.
const MAX_QUERIES: usize = 1_000;
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The queries that wait for agents.
#[derive(Default)]
pub struct FigureQueries(Mutex<HashMap<String, oneshot::Sender<FiguresAnswer>>>);

/// The figures that a session has sent.
pub struct SessionFigures {
    rows: Mutex<SessionRows>,
    /// Bytes of the rows of all sessions.
    total: Arc<AtomicUsize>,
}

#[derive(Default)]
struct SessionRows {
    cores: u32,
    mem_kb: u64,
    bytes: usize,
    by_instance: HashMap<InstanceKey, (TreeFigures, i64)>,
}

/// The newest figures of an instance, and shares of its host in percent.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceFigures {
    pub cpu_percent: f64,
    pub mem_percent: f64,
    pub details: FigureDetails,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Bytes that a row counts for.
fn row_bytes(instance: &InstanceKey) -> usize {
    ROW_BYTES + instance.namespace.as_str().len() + instance.name.as_str().len()
}

impl SessionFigures {
    /// `total`: bytes of the rows of all sessions.
    pub fn new(total: &Arc<AtomicUsize>) -> SessionFigures {
        SessionFigures { rows: Mutex::default(), total: Arc::clone(total) }
    }

    /// Takes the rows of an update. Rows of other hosts are ignored.
    fn receive(&self, hosts: &[HostKey], update: FiguresUpdate) {
        let FiguresUpdate { cores, mem_kb, complete, rows, answers: _ } = update;
        if !complete && rows.is_empty() {
            return;
        }
        let hosts: HashSet<&HostKey> = hosts.iter().collect();
        let now = clock::now().0;
        let mut known = locked(&self.rows);
        if complete {
            self.release(known.bytes);
            *known = SessionRows::default();
        }
        (known.cores, known.mem_kb) = (cores, mem_kb);
        for FigureRow(instance, figures) in rows.into_iter().filter(|row| hosts.contains(&row.0.host)) {
            match figures {
                Some(figures) => self.set(&mut known, instance, (figures, now)),
                None => self.remove(&mut known, &instance),
            }
        }
    }

    fn set(&self, known: &mut SessionRows, instance: InstanceKey, row: (TreeFigures, i64)) {
        if let Some(old) = known.by_instance.get_mut(&instance) {
            *old = row;
            return;
        }
        let bytes = row_bytes(&instance);
        if known.bytes + bytes > MAX_SESSION_BYTES || self.total.load(Ordering::Relaxed) + bytes > MAX_BYTES {
            return;
        }
        known.bytes += bytes;
        self.total.fetch_add(bytes, Ordering::Relaxed);
        known.by_instance.insert(instance, row);
    }

    fn remove(&self, known: &mut SessionRows, instance: &InstanceKey) {
        if known.by_instance.remove(instance).is_some() {
            let bytes = row_bytes(instance);
            known.bytes -= bytes;
            self.release(bytes);
        }
    }

    fn release(&self, bytes: usize) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn get(&self, instance: &InstanceKey) -> Option<InstanceFigures> {
        let known = locked(&self.rows);
        let (figures, at) = known.by_instance.get(instance)?;
        Some(InstanceFigures {
            cpu_percent: rounded_percent(f64::from(figures.cpu_milli) / 10.0 / f64::from(known.cores.max(1))),
            mem_percent: rounded_percent(figures.mem_kb as f64 / known.mem_kb.max(1) as f64 * 100.0),
            details: details(*figures, *at),
        })
    }
}

impl Drop for SessionFigures {
    fn drop(&mut self) {
        let bytes = locked(&self.rows).bytes;
        self.release(bytes);
    }
}

impl FigureQueries {
    fn answer(&self, answers: Vec<FiguresAnswer>) {
        for answer in answers {
            // A query that timed out has no receiver.
            let query = locked(&self.0).remove(&answer.id);
            query.into_iter().for_each(|query| drop(query.send(answer.clone())));
        }
    }

    fn expect(&self, id: &str) -> Option<oneshot::Receiver<FiguresAnswer>> {
        let mut queries = locked(&self.0);
        queries.retain(|_, query| !query.is_closed());
        let (send, receive) = oneshot::channel();
        (queries.len() < MAX_QUERIES).then(|| {
            queries.insert(id.to_owned(), send);
            receive
        })
    }
}

fn details(figures: TreeFigures, at: i64) -> FigureDetails {
    FigureDetails {
        time: Time(at).to_string(),
        cores: f64::from(figures.cpu_milli) / 1000.0,
        memory: figures.mem_kb.saturating_mul(1024),
        fds: figures.fds,
        threads: figures.threads,
        processes: figures.processes,
    }
}

impl<S: Store> Gateway<S> {
    /// Takes the figures that an agent sends.
    pub fn receive_figures(&self, session: &str, bytes: &[u8]) -> Result<Envelope<Value>, ApiError> {
        let hosts = self.session_hosts(session)?;
        let mut update: FiguresUpdate = serde_json::from_slice(bytes)?;
        self.figures.answer(std::mem::take(&mut update.answers));
        if let Some(figures) = self.hosts.figures(session) {
            figures.receive(&hosts, update);
        }
        Ok(Envelope::ok(json!({})))
    }

    /// The newest figures of an instance, while its agent is connected.
    pub(super) fn figures_of(&self, instance: &InstanceKey) -> Option<InstanceFigures> {
        self.hosts.open_figures(&instance.host)?.get(instance)
    }

    /// Asks the agent of an instance for fresh figures and those of the last hour.
    pub async fn figure_series(&self, instance: &InstanceKey) -> Result<FigureSeries, ApiError> {
        let refused = |why: &str| ApiError::BadRequest(format!("host {}: {why}", instance.host));
        if !self.hosts.answers_queries(&instance.host) {
            return Err(refused("no agent is connected that reports figures"));
        }
        let id = fresh_id();
        let answer = self.figures.expect(&id).ok_or_else(|| refused("too many queries wait for agents"))?;
        self.hosts.send(&instance.host, ToAgent::Measure { id, instance: instance.clone() });
        let answer = tokio::time::timeout(QUERY_TIMEOUT, answer).await;
        let Ok(Ok(FiguresAnswer { now, points, .. })) = answer else {
            return Err(refused("the agent did not answer in time"));
        };
        let sample = |FigurePoint(at, figures): &FigurePoint| FigureSample {
            time: Time(*at).to_string(),
            cores: f64::from(figures.cpu_milli) / 1000.0,
            memory: figures.mem_kb.saturating_mul(1024),
            fds: figures.fds,
            threads: figures.threads,
        };
        Ok(FigureSeries {
            instance: instance.clone(),
            now: now.map(|figures| details(figures, clock::now().0)),
            points: points.iter().map(sample).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> InstanceKey {
        name.parse().expect("a key")
    }

    const FIGURES: TreeFigures =
        TreeFigures { cpu_milli: 500, mem_kb: 1000, fds: 7, threads: 3, processes: 2 };

    fn update(complete: bool, rows: &[(&str, Option<TreeFigures>)]) -> FiguresUpdate {
        let rows = rows.iter().map(|(name, figures)| FigureRow(key(name), *figures)).collect();
        FiguresUpdate { cores: 2, mem_kb: 4000, complete, rows, answers: Vec::new() }
    }

    #[test]
    fn figures_belong_to_the_hosts_of_a_session_and_end_with_it() {
        let total = Arc::default();
        let session = SessionFigures::new(&total);
        let hosts = [key("0:10.0.0.1:web:a").host];
        let both = [("0:10.0.0.1:web:a", Some(FIGURES)), ("0:10.0.0.2:web:a", Some(FIGURES))];
        session.receive(&hosts, update(true, &both));
        let found = session.get(&key("0:10.0.0.1:web:a")).expect("figures");
        assert_eq!((found.cpu_percent, found.mem_percent, found.details.cores), (25.0, 25.0, 0.5));
        assert_eq!(session.get(&key("0:10.0.0.2:web:a")), None, "a host of another session");
        session.receive(&hosts, update(false, &[("0:10.0.0.1:web:b", Some(FIGURES))]));
        assert!(session.get(&key("0:10.0.0.1:web:a")).is_some(), "unchanged");
        session.receive(&hosts, update(false, &[("0:10.0.0.1:web:b", None)]));
        assert!(session.get(&key("0:10.0.0.1:web:b")).is_none(), "stopped");
        session.receive(&hosts, update(true, &[("0:10.0.0.1:web:b", Some(FIGURES))]));
        assert!(session.get(&key("0:10.0.0.1:web:a")).is_none(), "not in the complete update");
        assert_eq!(total.load(Ordering::Relaxed), row_bytes(&key("0:10.0.0.1:web:b")));
        drop(session);
        assert_eq!(total.load(Ordering::Relaxed), 0);
    }

    /// Rows of the largest update that a body can have, from a session with the most hosts.
    #[test]
    fn an_update_is_taken_in_time_and_within_its_bytes() {
        let host = |number: usize| HostKey::Address {
            cloud: 0,
            ip: std::net::Ipv4Addr::from_bits(0x0a00_0000 + number as u32).into(),
        };
        let hosts: Vec<HostKey> = (0..100_000).map(host).collect();
        let row = |number: usize| {
            let instance = InstanceKey { host: hosts[number % 100_000].clone(), ..key("0:10.0.0.1:web:a") };
            let name = format!("a{}", number / 100_000).parse().expect("a name");
            FigureRow(InstanceKey { name, ..instance }, Some(FIGURES))
        };
        let rows = |range: std::ops::Range<usize>| range.map(row).collect();
        let (total, begun) = (Arc::default(), std::time::Instant::now());
        let session = SessionFigures::new(&total);
        for part in 0..4 {
            let rows = rows(part * 100_000..(part + 1) * 100_000);
            session.receive(&hosts, FiguresUpdate { rows, ..update(false, &[]) });
        }
        // The product of rows and hosts would take hours.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        let bytes = total.load(Ordering::Relaxed);
        assert!(
            bytes > MAX_SESSION_BYTES - 1000 && bytes <= MAX_SESSION_BYTES,
            "{bytes} bytes of one session"
        );
        assert!(session.get(&key("0:10.0.0.1:web:a0")).is_some());
        // Other sessions have their own bytes, up to the total.
        total.fetch_add(MAX_BYTES - bytes, Ordering::Relaxed);
        let other = SessionFigures::new(&total);
        other.receive(&hosts, FiguresUpdate { rows: rows(0..1), ..update(false, &[]) });
        assert!(other.get(&key("0:10.0.0.0:web:a0")).is_none(), "the total is used");
        drop(session);
        other.receive(&hosts, FiguresUpdate { rows: rows(0..1), ..update(false, &[]) });
        assert!(other.get(&key("0:10.0.0.0:web:a0")).is_some(), "an ended session leaves its bytes");
    }
}
