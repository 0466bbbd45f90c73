//! Completion: processes that ended as their restart policy allows, and stay stopped.

use tracing::info;

use super::InstanceTask;
use crate::agent::restart_policy::{Completion, ProcessEnd, completion};
use crate::agent_protocol::{InstanceHistory, OwnedSpec};
use crate::model::{AutoType, Effect, RestartPolicy, RestartWhen, difference};

impl InstanceTask {
    /// End of the process whose handle is still open.
    pub(super) fn process_end(&self, code: Option<i32>) -> ProcessEnd {
        let is_signalled = self.handle.as_ref().is_some_and(|handle| handle.was_signalled());
        match code {
            Some(code) if is_signalled => ProcessEnd::Signalled(code),
            Some(code) => ProcessEnd::Exited(code),
            None => ProcessEnd::Unknown,
        }
    }

    /// Records the completion of a resident process, if its policy allows this end. A process that ran with an outdated
    /// spec does not complete the registered one.
    pub(super) fn complete(&mut self, live: &OwnedSpec, end: ProcessEnd) -> bool {
        let given = self.state.given.as_ref().unwrap_or(live);
        let is_outdated =
            difference((&live.spec, live.revision), (&given.spec, given.revision)) >= Effect::Restart;
        let rule = &given.spec.restart;
        let is_resident = live.spec.monitor.auto_type == AutoType::Resident;
        let Some(outcome) = completion(rule, end).filter(|_| is_resident && !is_outdated) else {
            return false;
        };
        let how = match end {
            ProcessEnd::Exited(code) => format!("exited with {code}"),
            ProcessEnd::Signalled(code) => format!("killed by signal {}", code - 128),
            ProcessEnd::Unknown => "exited with an unknown code".to_owned(),
        };
        self.state.message = format!("{how}; {}", not_restarted(rule));
        self.state.completed = Some(outcome);
        info!(instance = %self.key, message = %self.state.message, "process completed");
        true
    }

    /// Whether a process that ended during its start check did its work: its policy allows that end. The spec of the start
    /// becomes the registered one.
    pub(super) fn completes_start(&mut self, live: &OwnedSpec, end: ProcessEnd) -> bool {
        if completion(&live.spec.restart, end) != Some(Completion::Success) {
            return false;
        }
        self.register_given(Some(live.clone()));
        self.complete(live, end)
    }

    /// Records a failure that the policy `never` does not retry: a failed launch, or a process that the agent stopped.
    pub(super) fn complete_failed(&mut self) -> bool {
        let rule = self.state.given.as_ref().map(|given| &given.spec.restart);
        let Some(rule) = rule.filter(|rule| rule.policy == RestartWhen::Never) else { return false };
        self.state.message = format!("{}; {}", self.state.message, not_restarted(rule));
        self.state.completed = Some(Completion::Failure);
        true
    }

    /// Replaces the registered spec. Another spec has not completed: it has yet to run.
    pub(super) fn register_given(&mut self, given: Option<OwnedSpec>) {
        let spec = |owned: &Option<OwnedSpec>| owned.as_ref().map(|owned| owned.spec.clone());
        // The history begins with the registration.
        if given.is_none() && self.state.given.is_some() {
            self.state.history = InstanceHistory::default();
        }
        if spec(&given) != spec(&self.state.given) {
            self.state.completed = None;
        }
        self.state.given = given;
        // The gateway sends the spec with the operation and with the registration: one of two equal specs is kept.
        if let (Some(given), Some(run)) = (&mut self.state.given, &self.state.run)
            && *given == run.live
        {
            given.clone_from(&run.live);
        }
    }
}

fn not_restarted(rule: &RestartPolicy) -> String {
    format!("restart policy {} does not restart it", rule.policy.word())
}
