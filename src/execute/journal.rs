//! What is about to be done, on disk before it is done.
//!
//! `journal/OWNER/RUN/N` is a call that was or will be made: its name, and what it asks for. The entry goes when every row of
//! it is final. What a run left behind when it died is settled by the next one, which asks for those calls by name.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::backend::Order;
use crate::model::InstanceKey;
use crate::store::{Error, Store, Txn};

/// A call, as it stands in the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub steps: Vec<(InstanceKey, String)>,
}

pub struct Journal<'a, S> {
    store: &'a S,
    run: String,
    next: AtomicU64,
}

fn place(owner: &str) -> String {
    format!("journal/{owner}/")
}

impl<'a, S: Store> Journal<'a, S> {
    pub fn new(store: &'a S, owner: &str, run: &str) -> Journal<'a, S> {
        Journal { store, run: format!("{}{run}/", place(owner)), next: AtomicU64::new(1) }
    }

    /// The name of a call that may be made now.
    pub async fn begin(&self, orders: &[Order]) -> Result<String, Error> {
        let name = format!("{}{:06}", self.run, self.next.fetch_add(1, Ordering::Relaxed));
        let steps = orders.iter().map(|order| (order.instance.clone(), order.op.word().to_owned())).collect();
        let call = Call { steps };
        self.store.txn(Txn::put(&name, serde_json::to_vec(&call).unwrap_or_default())).await?;
        // A header cannot hold everything that a key can.
        Ok(name.replace('/', "."))
    }

    /// Every row of it is final.
    pub async fn ended(&self, call: &str) {
        let key = format!("{}{}", self.run, call.rsplit('.').next().unwrap_or_default());
        if let Err(error) = self.store.txn(Txn::delete(key)).await {
            warn!(%error, "the journal keeps a call that is over");
        }
    }
}

/// What former runs left: the names of their calls.
pub async fn left<S: Store>(store: &S, owner: &str) -> Result<Vec<(String, Call)>, Error> {
    let page = store.range(&place(owner), None, usize::MAX).await?;
    let read = |entry: crate::store::Entry| {
        let call = serde_json::from_slice(&entry.value).ok()?;
        Some((entry.key.to_string(), call))
    };
    Ok(page.entries.into_iter().filter_map(read).collect())
}

/// A former run's call is settled.
pub async fn settle<S: Store>(store: &S, key: &str) -> Result<(), Error> {
    store.txn(Txn::delete(key)).await.map(|_| ())
}

/// The name that a call was made under.
pub fn name_of(key: &str) -> String {
    key.replace('/', ".")
}
