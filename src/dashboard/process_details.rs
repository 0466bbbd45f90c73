//! Process details: figures, exits and messages of the target's rows, fetched on demand for the JSON API.
//!
//! Figures wake no watch, so the control loop has no current ones. A request reads the brief list of an Abide gateway, at
//! most once per [`MAX_AGE`] and within [`FETCH_TIMEOUT`]. The control loop is not involved.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::contract::{GatewayProcess, ReportedDetails, TargetProcess};
use crate::model::{InstanceKey, SyncStatus};

/// Maximum age of the details in a response.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Maximum time of a fetch. Without its answer the details are unknown.
const FETCH_TIMEOUT: Duration = Duration::from_secs(3);

type Fetch = Pin<Box<dyn Future<Output = Option<Vec<GatewayProcess>>> + Send>>;
/// Fetches the rows of the target; `None`: it has no such rows, or does not answer.
pub type DetailSource = Box<dyn Fn() -> Fetch + Send + Sync>;

type Details = Arc<BTreeMap<InstanceKey, ReportedDetails>>;

/// The details of the last fetch.
pub struct DetailCache {
    source: DetailSource,
    last: Mutex<Option<(Instant, Details)>>,
}

impl DetailCache {
    pub fn new(source: DetailSource) -> DetailCache {
        DetailCache { source, last: Mutex::new(None) }
    }

    /// The details of each instance. One fetch serves all concurrent requests.
    pub async fn get(&self) -> Details {
        let mut last = self.last.lock().await;
        if let Some((at, details)) = &*last
            && at.elapsed() < MAX_AGE
        {
            return Arc::clone(details);
        }
        let rows = timeout(FETCH_TIMEOUT, (self.source)()).await.ok().flatten().unwrap_or_default();
        let details = |row: GatewayProcess| {
            let instance = row.instance.clone();
            let listed = TargetProcess::Gateway(Box::new(row)).listed(SyncStatus::Unknown);
            (instance, ReportedDetails::from(listed))
        };
        let details: Details = Arc::new(rows.into_iter().map(details).collect());
        *last = Some((Instant::now(), Arc::clone(&details)));
        details
    }
}
