//! Inference of a step's outcome when the reply was lost: from an observation, never by sending the call again.

use std::time::Duration;

use crate::backend::RowState;
use crate::model::{Monitor, ObservedInstance, Op, Step, Time};

/// Outcome of a step that may have taken effect, as inferred from a live status check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inference {
    Done,
    /// The step has had no observable effect; it may still take effect.
    NotYet,
    /// The observation cannot show it. Repeating the step is harmless.
    Again,
    /// A process runs that started before the call was sent.
    NotOurs,
    Unknown,
}

/// Largest error of a start time, in milliseconds: platforms send it, and the time of the check, in whole seconds.
pub const START_ERROR: i64 = 2000;

/// Earliest start time of a process that a start sent at this time may have launched.
pub fn earliest(sent: Time) -> Time {
    Time(sent.0.saturating_sub(START_ERROR))
}

/// `before`: state when the call was sent. `runs_once`: the process is a one-shot, which must not run again.
/// `unproven`: nothing proves that the instance is ours; the time when the call was sent.
pub fn infer_outcome(
    op: Op,
    before: Option<&ObservedInstance>,
    now: Option<&ObservedInstance>,
    runs_once: bool,
    unproven: Option<Time>,
) -> Inference {
    if now.is_some_and(|seen| seen.unknown) {
        return Inference::Unknown;
    }
    let fact = |fact: fn(&ObservedInstance) -> Option<bool>| match now {
        None => Some(false),
        Some(seen) => fact(seen),
    };
    let (Some(running), Some(hosted)) = (fact(|seen| seen.running), fact(|seen| seen.hosted)) else {
        return Inference::Unknown;
    };
    let was = |fact: fn(&ObservedInstance) -> Option<bool>| before.and_then(fact) == Some(true);
    let pids = (before.and_then(|seen| seen.process.pid), now.and_then(|seen| seen.process.pid));
    let done_if = |is: bool| if is { Inference::Done } else { Inference::NotYet };
    match op {
        // The run may have ended already.
        Op::Start if runs_once && !running => Inference::Unknown,
        Op::Start if running && let Some(sent) = unproven => {
            match now.and_then(|seen| seen.process.started) {
                Some(started) if started >= sent => Inference::Done,
                // Either ours with a start time that was rounded down, or another process: neither is proven.
                Some(started) if started >= earliest(sent) => Inference::Unknown,
                Some(_) => Inference::NotOurs,
                None => Inference::Unknown,
            }
        }
        Op::Start => done_if(running),
        Op::Stop | Op::Kill => done_if(!running),
        Op::Restart => match pids {
            (Some(then), Some(now)) => done_if(then != now),
            (None, _) | (_, None) => Inference::Unknown,
        },
        Op::Supervise if was(|seen| seen.hosted) => Inference::Again,
        Op::Supervise => done_if(hosted),
        Op::Unsupervise => done_if(!hosted),
        Op::Reload | Op::Register | Op::Unregister => Inference::Again,
    }
}

/// Time that an operation may take before its row is overdue.
pub fn operation_timeout(step: &Step, poll: Duration) -> Duration {
    let monitor = step.spec.as_ref().map(|spec| spec.monitor.clone()).unwrap_or_default();
    let hooks = step.spec.as_ref().map(|spec| spec.hooks.clone()).unwrap_or_default();
    let start = monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
    let stop = monitor.stop_check_secs.unwrap_or(Monitor::STOP_CHECK_SECS);
    let (launch_hooks, stop_hook) = (hooks.launch_seconds(&monitor), hooks.stop_seconds(&monitor));
    let check = match step.op {
        Op::Start => start.saturating_add(launch_hooks),
        Op::Restart => start.saturating_add(launch_hooks).saturating_add(stop_hook),
        Op::Stop => stop.saturating_add(stop_hook),
        Op::Kill => stop,
        Op::Register | Op::Unregister | Op::Supervise | Op::Unsupervise | Op::Reload => 0,
    };
    let timeout = monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT);
    Duration::from_secs(u64::from(timeout) + u64::from(check)) + (poll * 2).max(Duration::from_secs(10))
}

/// Whether this state of a failed row means that a one-shot was started: it had ended before the start check, or it
/// failed. Another start would run it twice.
pub fn has_run(op: Op, state: RowState, runs_once: bool) -> bool {
    op == Op::Start && runs_once && matches!(state, RowState::CheckFailed | RowState::CommandFailed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RunningProcess;

    fn seen(running: bool, hosted: bool, pid: u32) -> ObservedInstance {
        let pid = running.then_some(pid);
        ObservedInstance {
            registered: Some(true),
            hosted: Some(hosted),
            running: Some(running),
            process: RunningProcess { pid, ..RunningProcess::default() },
            ..ObservedInstance::default()
        }
    }

    #[test]
    fn an_observed_effect_decides_and_other_operations_are_repeated_or_unknown() {
        let (up, down) = (seen(true, true, 7), seen(false, false, 0));
        let judge = |op, before: &ObservedInstance, now: &ObservedInstance| {
            infer_outcome(op, Some(before), Some(now), false, None)
        };
        assert_eq!(judge(Op::Start, &down, &up), Inference::Done);
        assert_eq!(judge(Op::Start, &down, &down), Inference::NotYet);
        assert_eq!(judge(Op::Stop, &up, &down), Inference::Done);
        assert_eq!(judge(Op::Kill, &up, &up), Inference::NotYet);
        assert_eq!(judge(Op::Restart, &up, &seen(true, true, 8)), Inference::Done);
        assert_eq!(judge(Op::Restart, &up, &up), Inference::NotYet);
        assert_eq!(judge(Op::Restart, &up, &down), Inference::Unknown);
        assert_eq!(judge(Op::Supervise, &seen(true, false, 7), &up), Inference::Done);
        assert_eq!(
            judge(Op::Supervise, &up, &up),
            Inference::Again,
            "it may be supervised with the old spec"
        );
        assert_eq!(judge(Op::Unsupervise, &up, &seen(true, false, 7)), Inference::Done);
        assert_eq!(judge(Op::Reload, &up, &up), Inference::Again);
        let lost = ObservedInstance { unknown: true, ..up.clone() };
        assert_eq!(judge(Op::Start, &down, &lost), Inference::Unknown);
    }

    fn test_step(op: Op, spec: crate::model::Spec) -> Step {
        let instance: crate::model::InstanceKey = "0:10.0.0.1:web:api".parse().expect("a key");
        let host = crate::model::Host { key: instance.host.clone(), supplier: None, agent_id: None };
        Step {
            id: 1,
            instance,
            host,
            op,
            spec_side: crate::model::SpecSide::New,
            spec: Some(std::sync::Arc::new(spec.into())),
            revision: None,
            reloaded_fields: Vec::new(),
            pid_stays: false,
            needs_live_check: false,
            from: None,
            why: Vec::new(),
        }
    }

    #[test]
    fn the_time_of_a_hook_is_part_of_the_time_of_a_launch() {
        use crate::model::{Hook, Hooks, Spec};
        let hook = |timeout| Some(Hook { run: "./work".to_owned(), timeout, ..Hook::default() });
        let step = |op: Op, hooks: Hooks| {
            let spec = Spec { hooks, ..Spec::default() };
            let plain = operation_timeout(&test_step(op, Spec::default()), Duration::ZERO);
            operation_timeout(&test_step(op, spec), Duration::ZERO) - plain
        };
        let before = |timeout| Hooks { before_start: hook(timeout), ..Hooks::default() };
        assert_eq!(step(Op::Start, before(Some(300))), Duration::from_secs(300));
        assert_eq!(step(Op::Restart, before(None)), Duration::from_secs(Monitor::OP_TIMEOUT.into()));
        assert_eq!(step(Op::Stop, before(Some(300))), Duration::ZERO);
        let all =
            Hooks { before_start: hook(Some(1)), before_stop: hook(Some(20)), after_start: hook(Some(300)) };
        for (op, secs) in
            [(Op::Start, 301), (Op::Stop, 20), (Op::Restart, 321), (Op::Kill, 0), (Op::Reload, 0)]
        {
            assert_eq!(step(op, all.clone()), Duration::from_secs(secs), "{op}");
        }
    }

    #[test]
    fn a_one_shot_that_was_begun_has_run_however_it_ended() {
        for state in [RowState::CheckFailed, RowState::CommandFailed] {
            assert!(has_run(Op::Start, state, true), "{state:?}");
            assert!(!has_run(Op::Start, state, false) && !has_run(Op::Stop, state, true), "{state:?}");
        }
        assert!(!has_run(Op::Start, RowState::AgentMissing, true), "no agent was connected");
        assert!(!has_run(Op::Start, RowState::Unreported, true), "the call was not sent");
    }

    #[test]
    fn a_run_that_may_have_ended_is_not_begun_again() {
        let down = seen(false, false, 0);
        assert_eq!(infer_outcome(Op::Start, None, Some(&down), true, None), Inference::Unknown);
        assert_eq!(infer_outcome(Op::Start, None, None, true, None), Inference::Unknown);
        assert_eq!(infer_outcome(Op::Start, None, Some(&seen(true, true, 5)), true, None), Inference::Done);
        assert_eq!(infer_outcome(Op::Start, None, None, false, None), Inference::NotYet);
    }

    #[test]
    fn a_start_is_done_only_by_a_process_that_started_after_it_was_sent() {
        let at = |started: Option<i64>| {
            let mut seen = seen(true, true, 5);
            seen.process.started = started.map(Time);
            seen
        };
        let judge =
            |now: &ObservedInstance| infer_outcome(Op::Start, None, Some(now), false, Some(Time(9_999)));
        assert_eq!(judge(&at(Some(9_999))), Inference::Done);
        for rounded in [9_998, 9_000, 7_999] {
            assert_eq!(judge(&at(Some(rounded))), Inference::Unknown, "{rounded}");
        }
        assert_eq!(judge(&at(Some(7_998))), Inference::NotOurs);
        assert_eq!(judge(&at(None)), Inference::Unknown);
        assert_eq!(judge(&seen(false, false, 0)), Inference::NotYet);
    }
}
