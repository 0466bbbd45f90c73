//! Operation log: the operations that this agent has received, so that each of them runs once.
//!
//! An operation is in flight from its arrival until the gateway acknowledges its result. Then a `ran/OP` record replaces
//! `up/OP` in one transaction, because a stream that was opened before the acknowledgement may still contain the operation.
//! The record keeps the result: a gateway that asks again, for instance one whose store was restored from a copy, gets it
//! again.
//!
//! A `ran/OP` record is deleted when the gateway confirms a floor at or above its sequence number, which means that the
//! gateway never sends the operation again. The floor itself is stored, and the agent refuses every operation at or below
//! it. Floors and sequence numbers count within one gateway store. Records of another store, or of a gateway that sends no
//! floors, are deleted after two days: such a gateway forgets its tasks after one.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tracing::{error, info, warn};

use super::state::{load_each, load_readable, result_key};
use crate::agent_protocol::{OpRequest, OpResult};
use crate::clock::{self, BootInstant};
use crate::store::{Embedded, Entry, Error, Store, Txn, keys};

/// Operations for which the log keeps memory.
const IDLE_OPERATIONS: usize = 64;
const TWO_DAYS_MS: i64 = 2 * 86_400_000;
/// A floor that deletes no record is written this often.
const FLOOR_WRITE_MS: u64 = 600_000;

/// The operations that an agent has received.
pub struct OpLog {
    in_flight: HashMap<String, StoreSeq>,
    ran: HashMap<String, (StoreSeq, i64)>,
    floor: StoreSeq,
    /// When the floor was last written.
    written: Option<BootInstant>,
    /// Identity of the gateway store of the current session.
    store: String,
}

/// A sequence number of one gateway store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct StoreSeq {
    seq: u64,
    /// Empty: an older gateway, or unknown.
    #[serde(default)]
    store: String,
}

/// An operation whose result the gateway has acknowledged.
#[derive(Serialize, Deserialize)]
struct AcknowledgedOp {
    #[serde(flatten)]
    number: StoreSeq,
    /// Milliseconds since 1970 by this host's clock.
    at: i64,
    result: OpResult,
}

/// The entry of the log for an operation that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLookup {
    New,
    /// The operation has no acknowledged result yet.
    InFlight,
    Ran,
    /// The gateway confirmed this floor: the operation is final.
    BelowFloor(u64),
}

impl OpLog {
    pub async fn open(store: &Embedded) -> Result<OpLog, Error> {
        let entry = store.get(keys::FLOOR).await?;
        let floor = entry.as_ref().map(Entry::decode).transpose()?.unwrap_or_default();
        let ran = load_each::<AcknowledgedOp>(store, keys::ACKNOWLEDGED_PREFIX).await?.into_iter().map(
            |(op, ran)| match ran {
                Ok(ran) => (op, (ran.number, ran.at)),
                // It ran: it must not run again.
                Err(error) => {
                    error!(%error, "cannot read the record of an operation");
                    (op, (StoreSeq::default(), clock::now().0))
                }
            },
        );
        // The store of an operation from before this start is unknown: its record is deleted by age.
        let results = load_readable::<OpResult>(store, keys::RESULT_PREFIX).await?.into_iter();
        let in_flight = results.map(|(op, result)| (op, StoreSeq { seq: result.seq, store: String::new() }));
        let (in_flight, ran) = (in_flight.collect(), ran.collect());
        Ok(OpLog { in_flight, ran, floor, written: None, store: String::new() })
    }

    /// The largest sequence number that this agent knows.
    pub fn last_seq(&self) -> u64 {
        let ran = self.ran.values().map(|(number, _)| number.seq);
        let known = self.in_flight.values().map(|number| number.seq).chain(ran);
        known.fold(self.floor.seq, u64::max)
    }

    /// Starts a session with a gateway. Deletes old records that no floor of this gateway will delete.
    pub async fn session_started(
        &mut self,
        store: &Embedded,
        gateway_store: &str,
        now: i64,
    ) -> Result<(), Error> {
        if !gateway_store.is_empty() && !self.floor.store.is_empty() && gateway_store != self.floor.store {
            info!(floor = self.floor.seq, "the gateway has another store: the stored floor is ignored");
        }
        gateway_store.clone_into(&mut self.store);
        let counted =
            |number: &StoreSeq| number.seq > 0 && !number.store.is_empty() && number.store == self.store;
        let old = |(number, at): &(StoreSeq, i64)| !counted(number) && now.saturating_sub(*at) > TWO_DAYS_MS;
        let old: Vec<String> =
            self.ran.iter().filter(|(_, entry)| old(entry)).map(|(op, _)| op.clone()).collect();
        self.forget(store, Txn::default(), &old).await
    }

    pub fn lookup(&self, request: &OpRequest) -> LogLookup {
        if self.in_flight.contains_key(&request.op_id) {
            return LogLookup::InFlight;
        }
        if self.ran.contains_key(&request.op_id) {
            return LogLookup::Ran;
        }
        let counts = !self.store.is_empty() && self.floor.store == self.store;
        match counts && 0 < request.seq && request.seq <= self.floor.seq {
            true => LogLookup::BelowFloor(self.floor.seq),
            false => LogLookup::New,
        }
    }

    pub fn begin(&mut self, request: &OpRequest) {
        let number = StoreSeq { seq: request.seq, store: self.store.clone() };
        self.in_flight.insert(request.op_id.clone(), number);
    }

    /// The result of an operation that ran before.
    pub async fn result(&self, store: &Embedded, op_id: &str) -> Result<Option<OpResult>, Error> {
        let entry = store.get(&ran_key(op_id)).await?;
        let ran: Option<AcknowledgedOp> = entry.as_ref().map(Entry::decode).transpose()?;
        Ok(ran.map(|ran| ran.result))
    }

    /// Records acknowledged results. Results of operations that are not in flight (live checks, refusals, repetitions)
    /// leave no record.
    pub async fn acknowledged(
        &mut self,
        store: &Embedded,
        results: Vec<OpResult>,
        now: i64,
    ) -> Result<(), Error> {
        let mut txn = Txn::default();
        let mut ran = Vec::new();
        for result in results {
            let Some(number) = self.in_flight.get(&result.op_id).cloned() else { continue };
            let op = result.op_id.clone();
            txn = txn.and(Txn::delete(result_key(&op)));
            let is_final = number.seq > 0 && number.store == self.floor.store && number.seq <= self.floor.seq;
            if !is_final {
                let record = AcknowledgedOp { number: number.clone(), at: now, result };
                txn = txn.and(Txn::put(ran_key(&op), serde_json::to_vec(&record).unwrap_or_default()));
            }
            ran.push((op, number, is_final));
        }
        if txn.writes.is_empty() {
            return Ok(());
        }
        store.txn(txn).await?;
        for (op, number, is_final) in ran {
            self.in_flight.remove(&op);
            if !is_final {
                self.ran.insert(op, (number, now));
            }
        }
        self.in_flight.shrink_to(IDLE_OPERATIONS);
        Ok(())
    }

    /// Raises the floor: the gateway never sends an operation up to this sequence number again.
    pub async fn raise_floor(&mut self, store: &Embedded, seq: u64) -> Result<(), Error> {
        if self.store.is_empty() || (self.floor.store == self.store && seq <= self.floor.seq) {
            return Ok(());
        }
        let floor = StoreSeq { seq, store: self.store.clone() };
        let is_final = |(number, _): &(StoreSeq, i64)| {
            0 < number.seq && number.seq <= seq && number.store == floor.store
        };
        let over: Vec<String> =
            self.ran.iter().filter(|(_, entry)| is_final(entry)).map(|(op, _)| op.clone()).collect();
        // Records may only be deleted in the commit that writes the floor which replaces them. Without records the write can
        // wait: the floor rises with every operation of the whole fleet.
        let due = self.written.is_none_or(|written| written.elapsed_ms() > FLOOR_WRITE_MS);
        if !over.is_empty() || due {
            let txn = Txn::put(keys::FLOOR, serde_json::to_vec(&floor).unwrap_or_default());
            self.forget(store, txn, &over).await?;
            self.written = Some(BootInstant::now());
        }
        self.floor = floor;
        Ok(())
    }

    async fn forget(&mut self, store: &Embedded, txn: Txn, ops: &[String]) -> Result<(), Error> {
        let txn = ops.iter().fold(txn, |txn, op| txn.and(Txn::delete(ran_key(op))));
        if txn.writes.is_empty() {
            return Ok(());
        }
        if let Err(error) = store.txn(txn).await {
            warn!(%error, "cannot write the operation log");
            return Err(error);
        }
        for op in ops {
            self.ran.remove(op);
        }
        self.ran.shrink_to(IDLE_OPERATIONS);
        Ok(())
    }
}

fn ran_key(op_id: &str) -> String {
    keys::acknowledged(op_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(op_id: &str, seq: u64) -> OpRequest {
        let request = serde_json::json!({"seq": seq, "op_id": op_id, "task": "t", "instance": "0:10.0.0.1:web:p", "op": "start",
                                         "spec": null, "owner": null, "generation": null, "deadline": 0});
        serde_json::from_value(request).expect("a request of an older gateway")
    }

    fn result(op_id: &str, seq: u64) -> OpResult {
        OpResult { op_id: op_id.to_owned(), seq, code: 0, message: "success".to_owned(), content: None }
    }

    async fn records(store: &Embedded) -> usize {
        store.range("ran/", None, usize::MAX).await.expect("a page").entries.len()
    }

    #[tokio::test]
    async fn an_operation_is_known_until_its_floor_is_confirmed_and_refused_after_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("agent.db");
        let store = Embedded::open(&file).expect("it opens");
        let mut log = OpLog::open(&store).await.expect("it opens");
        log.session_started(&store, "one", 0).await.expect("it is written");
        let (first, second) = (request("a/0", 11), request("b/0", 12));
        log.begin(&first);
        assert_eq!((log.lookup(&first), log.lookup(&second)), (LogLookup::InFlight, LogLookup::New));
        log.acknowledged(&store, vec![result("a/0", 11)], 0).await.expect("it is written");
        assert_eq!((log.lookup(&first), records(&store).await, log.last_seq()), (LogLookup::Ran, 1, 11));
        // It survives a restart, and a repetition of its result leaves no second record.
        let mut log = OpLog::open(&store).await.expect("it opens");
        log.session_started(&store, "one", i64::MAX).await.expect("it is written");
        assert_eq!(log.lookup(&first), LogLookup::Ran, "its age does not count where floors do");
        let repeated = log.result(&store, "a/0").await.expect("it is read");
        assert_eq!(repeated, Some(result("a/0", 11)));
        log.raise_floor(&store, 10).await.expect("it is written");
        assert_eq!((log.lookup(&first), records(&store).await), (LogLookup::Ran, 1));
        log.raise_floor(&store, 11).await.expect("it is written");
        assert_eq!((log.lookup(&first), log.lookup(&second)), (LogLookup::BelowFloor(11), LogLookup::New));
        assert_eq!(records(&store).await, 0);
        let mut log = OpLog::open(&store).await.expect("it opens");
        log.session_started(&store, "one", 0).await.expect("it is written");
        assert_eq!(log.lookup(&first), LogLookup::BelowFloor(11));
        // A result that comes after the floor needs no record.
        log.begin(&second);
        log.raise_floor(&store, 12).await.expect("it is written");
        log.acknowledged(&store, vec![result("b/0", 12)], 0).await.expect("it is written");
        assert_eq!((records(&store).await, log.lookup(&second)), (0, LogLookup::BelowFloor(12)));
    }

    #[tokio::test]
    async fn another_gateway_store_has_its_own_numbers() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Embedded::open(&folder.path().join("agent.db")).expect("it opens");
        let mut log = OpLog::open(&store).await.expect("it opens");
        log.session_started(&store, "one", 0).await.expect("it is written");
        log.raise_floor(&store, 100).await.expect("it is written");
        let later = request("later/0", 101);
        log.begin(&later);
        log.acknowledged(&store, vec![result("later/0", 101)], 0).await.expect("it is written");
        log.session_started(&store, "two", 0).await.expect("it is written");
        assert_eq!(log.lookup(&request("low/0", 5)), LogLookup::New);
        log.raise_floor(&store, 1000).await.expect("it is written");
        assert_eq!(log.lookup(&later), LogLookup::Ran, "a floor of another store does not apply");
        // Neither does an older gateway, which has no floors: two days are enough.
        log.session_started(&store, "", TWO_DAYS_MS + 1).await.expect("it is written");
        assert_eq!((log.lookup(&later), records(&store).await), (LogLookup::New, 0));
    }
}
