//! Figures of processes: the newest batch of each agent, in memory, and queries for the last hour.
//!
//! Figures are never stored, so they wake no watch and change no row's number. They count while the session that sent
//! them is open.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::{ApiError, Gateway};
use crate::agent_protocol::{FigurePoint, FigureRow, FiguresAnswer, FiguresUpdate, ToAgent, TreeFigures};
use crate::clock;
use crate::contract::{FigureDetails, FigureSample, FigureSeries};
use crate::gse::response::Envelope;
use crate::ids::fresh_id;
use crate::model::{HostKey, InstanceKey, Time};
use crate::store::Store;

/// Maximum instances of one host, as for reports.
const MAX_ROWS: usize = 100_000;
/// Maximum queries that wait for an agent, and their timeout.
const MAX_QUERIES: usize = 1_000;
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// The figures of all hosts.
#[derive(Default)]
pub struct FigureBoard {
    hosts: Mutex<HashMap<HostKey, HostFigures>>,
    queries: Mutex<HashMap<String, oneshot::Sender<FiguresAnswer>>>,
}

/// The figures of one host.
#[derive(Default)]
struct HostFigures {
    session: String,
    cores: u32,
    mem_kb: u64,
    rows: HashMap<InstanceKey, (TreeFigures, i64)>,
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

impl FigureBoard {
    /// Takes an update of a session. Rows of other hosts are ignored.
    fn receive(&self, session: &str, hosts: &[HostKey], update: FiguresUpdate) {
        let FiguresUpdate { cores, mem_kb, complete, rows, answers } = update;
        let now = clock::now().0;
        if complete || !rows.is_empty() {
            let mut known = locked(&self.hosts);
            for host in hosts {
                let figures = known.entry(host.clone()).or_default();
                if complete || figures.session != session {
                    figures.rows.clear();
                }
                (figures.session, figures.cores, figures.mem_kb) = (session.to_owned(), cores, mem_kb);
            }
            for FigureRow(instance, figures) in rows {
                if !hosts.contains(&instance.host) {
                    continue;
                }
                let of_host = known.entry(instance.host.clone()).or_default();
                match figures {
                    Some(figures)
                        if of_host.rows.len() < MAX_ROWS || of_host.rows.contains_key(&instance) =>
                    {
                        of_host.rows.insert(instance, (figures, now));
                    }
                    Some(_) => {}
                    None => drop(of_host.rows.remove(&instance)),
                }
            }
        }
        for answer in answers {
            // A query that timed out has no receiver.
            let query = locked(&self.queries).remove(&answer.id);
            query.into_iter().for_each(|query| drop(query.send(answer.clone())));
        }
    }

    /// The figures of an instance. `is_open`: whether a session is that of the host's connected agent.
    fn get(&self, instance: &InstanceKey, is_open: impl Fn(&str) -> bool) -> Option<InstanceFigures> {
        let known = locked(&self.hosts);
        let host = known.get(&instance.host)?;
        let (figures, at) = host.rows.get(instance)?;
        is_open(&host.session).then(|| InstanceFigures {
            cpu_percent: f64::from(figures.cpu_milli) / 10.0 / f64::from(host.cores.max(1)),
            mem_percent: figures.mem_kb as f64 / host.mem_kb.max(1) as f64 * 100.0,
            details: details(*figures, *at),
        })
    }

    fn expect(&self, id: &str) -> Option<oneshot::Receiver<FiguresAnswer>> {
        let mut queries = locked(&self.queries);
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
        self.figures.receive(session, &hosts, serde_json::from_slice(bytes)?);
        Ok(Envelope::ok(json!({})))
    }

    /// The newest figures of an instance, while its agent is connected.
    pub(super) fn figures_of(&self, instance: &InstanceKey) -> Option<InstanceFigures> {
        self.figures.get(instance, |session| self.hosts.has_open(&instance.host, session))
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

    #[test]
    fn figures_belong_to_the_hosts_of_a_session_and_end_with_it() {
        let board = FigureBoard::default();
        let key = |name: &str| name.parse::<InstanceKey>().expect("a key");
        let host = key("0:10.0.0.1:web:a").host;
        let figures = TreeFigures { cpu_milli: 500, mem_kb: 1000, fds: 7, threads: 3, processes: 2 };
        let update = |complete, rows: &[(&str, Option<TreeFigures>)]| FiguresUpdate {
            cores: 2,
            mem_kb: 4000,
            complete,
            rows: rows.iter().map(|(name, figures)| FigureRow(key(name), *figures)).collect(),
            answers: Vec::new(),
        };
        let both = [("0:10.0.0.1:web:a", Some(figures)), ("0:10.0.0.2:web:a", Some(figures))];
        board.receive("one", std::slice::from_ref(&host), update(true, &both));
        let found = board.get(&key("0:10.0.0.1:web:a"), |session| session == "one").expect("figures");
        assert_eq!((found.cpu_percent, found.mem_percent, found.details.cores), (25.0, 25.0, 0.5));
        assert_eq!(board.get(&key("0:10.0.0.2:web:a"), |_| true), None, "a host of another session");
        assert_eq!(
            board.get(&key("0:10.0.0.1:web:a"), |session| session == "two"),
            None,
            "the agent is gone"
        );
        board.receive(
            "one",
            std::slice::from_ref(&host),
            update(false, &[("0:10.0.0.1:web:b", Some(figures))]),
        );
        assert!(board.get(&key("0:10.0.0.1:web:a"), |_| true).is_some(), "unchanged");
        board.receive("one", std::slice::from_ref(&host), update(false, &[("0:10.0.0.1:web:b", None)]));
        assert!(board.get(&key("0:10.0.0.1:web:b"), |_| true).is_none(), "stopped");
        board.receive(
            "two",
            std::slice::from_ref(&host),
            update(false, &[("0:10.0.0.1:web:b", Some(figures))]),
        );
        assert!(
            board.get(&key("0:10.0.0.1:web:a"), |_| true).is_none(),
            "another session has sent no such row"
        );
    }
}
