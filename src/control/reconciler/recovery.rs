//! Recovery state: calls that crashed runs left in the journal, and when to resolve them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::context::PassContext;
use crate::control::Target;
use crate::control::executor::with_lease_renewal;
use crate::control::in_flight::InFlightPlans;
use crate::execute::journal::{self, Call};
use crate::execute::{self, RecoveryError};
use crate::model::InstanceKey;
use crate::reconcile::Caps;
use crate::store::{Error, Lease};

/// Time that a pass spends on calls of crashed runs, the minimum per call, and the delay before the next attempt.
const RECOVERY_BUDGET: Duration = Duration::from_secs(3);
const MIN_RECOVERY_TIME: Duration = Duration::from_millis(200);
const RECOVERY_RETRY_INTERVAL: Duration = Duration::from_secs(10);

pub struct Recovery {
    /// A run may have left calls in the journal.
    is_expected: bool,
    /// Calls of crashed runs that are still in flight, and their instances.
    open: BTreeMap<String, BTreeSet<InstanceKey>>,
    /// When the open calls are polled again.
    retry_at: Option<Instant>,
}

impl Default for Recovery {
    /// An earlier controller may have crashed.
    fn default() -> Recovery {
        Recovery { is_expected: true, open: BTreeMap::new(), retry_at: None }
    }
}

impl Recovery {
    /// A run may leave calls in the journal from here on.
    pub fn expect(&mut self) {
        self.is_expected = true;
    }

    /// Whether open calls are due for another poll.
    pub fn is_due(&self) -> bool {
        self.retry_at.is_some_and(|then| then <= Instant::now())
    }

    /// Whether calls are resolved before the target is observed: where specs are not read back, an observation alone
    /// takes a sent spec for the effective one.
    pub fn comes_first(&self, caps: &Caps) -> bool {
        (self.is_expected && !caps.reads_specs) || self.is_due()
    }

    /// Instances with a call that is still in flight.
    pub fn open_instances(&self) -> impl Iterator<Item = &InstanceKey> {
        self.open.values().flatten()
    }

    /// The journal has no calls of crashed runs.
    pub fn set_resolved(&mut self) {
        if self.is_due() {
            // Another controller resolved them.
            (self.open, self.retry_at) = (BTreeMap::new(), None);
        }
        self.is_expected = false;
    }

    /// Whatever the result of this attempt, the next one waits for its interval.
    pub fn postpone(&mut self) {
        self.retry_at = self.retry_at.map(|_| Instant::now() + RECOVERY_RETRY_INTERVAL);
    }

    /// Calls that crashed runs left in the journal, without those that were in flight at the last attempt.
    pub async fn unfinished_calls<T: Target>(
        &self,
        context: PassContext<'_, T>,
        in_flight: &InFlightPlans,
    ) -> Result<Vec<(String, Call)>, Error> {
        let owner = context.owner();
        let mut left = journal::unfinished(context.state(), owner).await?;
        left.retain(|(key, _)| {
            let is_ours = in_flight.run_ids().any(|run| journal::belongs_to_run(key, owner, run));
            !is_ours && (self.is_due() || !self.open.contains_key(key))
        });
        Ok(left)
    }

    /// Resolves calls of crashed runs. Their instances are held while a call takes longer, so that nothing else waits
    /// for it.
    pub async fn resolve<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        left: Vec<(String, Call)>,
        lease: &Lease,
    ) -> Result<(), RecoveryError> {
        let (state, target) = (context.state(), context.target);
        let target_caps = (target.name(), &context.config.rules.caps);
        let until = Instant::now() + RECOVERY_BUDGET;
        let mut open = BTreeMap::new();
        for (key, call) in left {
            let instances = call.steps.iter().map(|began| began.instance.clone()).collect();
            // A slow call does not use up the time of the others.
            let deadline = until.max(Instant::now() + MIN_RECOVERY_TIME);
            let one = vec![(key.clone(), call)];
            let owner = context.owner();
            let recovering = execute::recover(target.backend(), state, target_caps, owner, one, deadline);
            match with_lease_renewal(state, lease, recovering).await {
                Ok(()) => {}
                Err(RecoveryError::UnderWay(_)) => drop(open.insert(key, instances)),
                Err(error @ (RecoveryError::Target(_) | RecoveryError::State(_))) => return Err(error),
            }
        }
        self.retry_at = (!open.is_empty()).then(|| Instant::now() + RECOVERY_RETRY_INTERVAL);
        self.open = open;
        Ok(())
    }
}
