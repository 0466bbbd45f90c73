//! A call whose answer was lost: was it carried out? Decided by looking, never by sending it again.

use std::time::Duration;

use crate::model::{Monitor, Op, Seen, Step, Time};

/// What a close look says of a step that may have been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Done,
    /// It was not, as far as can be seen: it may still come.
    NotYet,
    /// Looking cannot tell. Doing it again does no harm.
    Again,
    /// A process runs that was there before the start was sent.
    NotOurs,
    Unknown,
}

/// Largest error of a start time, in milliseconds: platforms send it, and the time of the check, in whole seconds.
pub const START_ERROR: i64 = 2000;

/// Earliest start time of a process that a start which was sent at this time may have made.
pub fn earliest(sent: Time) -> Time {
    Time(sent.0.saturating_sub(START_ERROR))
}

/// `before`: how it was when it was sent. `runs_once`: another run would be one too many. `unproven`: nothing proves that
/// the instance is ours, and this is when the call was sent.
pub fn judge(
    op: Op,
    before: Option<&Seen>,
    now: Option<&Seen>,
    runs_once: bool,
    unproven: Option<Time>,
) -> Verdict {
    if now.is_some_and(|seen| seen.unknown) {
        return Verdict::Unknown;
    }
    let fact = |fact: fn(&Seen) -> Option<bool>| match now {
        None => Some(false),
        Some(seen) => fact(seen),
    };
    let (Some(running), Some(hosted)) = (fact(|seen| seen.running), fact(|seen| seen.hosted)) else {
        return Verdict::Unknown;
    };
    let was = |fact: fn(&Seen) -> Option<bool>| before.and_then(fact) == Some(true);
    let pids = (before.and_then(|seen| seen.pid), now.and_then(|seen| seen.pid));
    let so = |is: bool| if is { Verdict::Done } else { Verdict::NotYet };
    match op {
        // It may have run and ended.
        Op::Start if runs_once && !running => Verdict::Unknown,
        Op::Start if running && let Some(sent) = unproven => match now.and_then(|seen| seen.started) {
            Some(started) if started >= sent => Verdict::Done,
            // Ours by a start time that was rounded down, or another one's: neither is proven.
            Some(started) if started >= earliest(sent) => Verdict::Unknown,
            Some(_) => Verdict::NotOurs,
            None => Verdict::Unknown,
        },
        Op::Start => so(running),
        Op::Stop | Op::Kill => so(!running),
        Op::Restart => match pids {
            (Some(then), Some(now)) => so(then != now),
            (None, _) | (_, None) => Verdict::Unknown,
        },
        Op::Host if was(|seen| seen.hosted) => Verdict::Again,
        Op::Host => so(hosted),
        Op::Unhost => so(!hosted),
        Op::Reload | Op::Register | Op::Unregister => Verdict::Again,
    }
}

/// How long an operation may take until its row is overdue.
pub fn patience(step: &Step, poll: Duration) -> Duration {
    let monitor = step.spec.as_ref().map(|spec| spec.monitor.clone()).unwrap_or_default();
    let check = match step.op {
        Op::Start | Op::Restart => monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS),
        Op::Stop | Op::Kill => monitor.stop_check_secs.unwrap_or(Monitor::STOP_CHECK_SECS),
        Op::Register | Op::Unregister | Op::Host | Op::Unhost | Op::Reload => 0,
    };
    let timeout = monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT);
    Duration::from_secs(u64::from(timeout) + u64::from(check)) + (poll * 2).max(Duration::from_secs(10))
}

/// Does a failure with this code say that a one-shot was begun? It has ended by the time it is checked (836), or it ended
/// badly (65535): whoever began it again would run it twice.
pub fn has_run(op: Op, code: i64, runs_once: bool) -> bool {
    op == Op::Start && runs_once && matches!(code, 836 | 65535)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(running: bool, hosted: bool, pid: u32) -> Seen {
        let pid = running.then_some(pid);
        Seen { registered: Some(true), hosted: Some(hosted), running: Some(running), pid, ..Seen::default() }
    }

    #[test]
    fn what_can_be_seen_decides_and_the_rest_may_be_done_again_or_is_unknown() {
        let (up, down) = (seen(true, true, 7), seen(false, false, 0));
        let judge = |op, before: &Seen, now: &Seen| judge(op, Some(before), Some(now), false, None);
        assert_eq!(judge(Op::Start, &down, &up), Verdict::Done);
        assert_eq!(judge(Op::Start, &down, &down), Verdict::NotYet);
        assert_eq!(judge(Op::Stop, &up, &down), Verdict::Done);
        assert_eq!(judge(Op::Kill, &up, &up), Verdict::NotYet);
        assert_eq!(judge(Op::Restart, &up, &seen(true, true, 8)), Verdict::Done);
        assert_eq!(judge(Op::Restart, &up, &up), Verdict::NotYet);
        assert_eq!(judge(Op::Restart, &up, &down), Verdict::Unknown);
        assert_eq!(judge(Op::Host, &seen(true, false, 7), &up), Verdict::Done);
        assert_eq!(judge(Op::Host, &up, &up), Verdict::Again, "it may be guarded by the old spec");
        assert_eq!(judge(Op::Unhost, &up, &seen(true, false, 7)), Verdict::Done);
        assert_eq!(judge(Op::Reload, &up, &up), Verdict::Again);
        let lost = Seen { unknown: true, ..up.clone() };
        assert_eq!(judge(Op::Start, &down, &lost), Verdict::Unknown);
    }

    #[test]
    fn a_one_shot_that_was_begun_has_run_however_it_ended() {
        for code in [836, 65535] {
            assert!(has_run(Op::Start, code, true), "{code}");
            assert!(!has_run(Op::Start, code, false) && !has_run(Op::Stop, code, true), "{code}");
        }
        assert!(!has_run(Op::Start, 117, true), "no agent was there");
        assert!(!has_run(Op::Start, 0, true), "it never left");
    }

    #[test]
    fn a_run_that_may_have_ended_is_not_begun_again() {
        let down = seen(false, false, 0);
        assert_eq!(judge(Op::Start, None, Some(&down), true, None), Verdict::Unknown);
        assert_eq!(judge(Op::Start, None, None, true, None), Verdict::Unknown);
        assert_eq!(judge(Op::Start, None, Some(&seen(true, true, 5)), true, None), Verdict::Done);
        assert_eq!(judge(Op::Start, None, None, false, None), Verdict::NotYet);
    }

    #[test]
    fn a_start_is_done_only_by_a_process_that_started_after_it_was_sent() {
        let at = |started: Option<i64>| Seen { started: started.map(Time), ..seen(true, true, 5) };
        let judge = |now: &Seen| judge(Op::Start, None, Some(now), false, Some(Time(9_999)));
        assert_eq!(judge(&at(Some(9_999))), Verdict::Done);
        for rounded in [9_998, 9_000, 7_999] {
            assert_eq!(judge(&at(Some(rounded))), Verdict::Unknown, "{rounded}");
        }
        assert_eq!(judge(&at(Some(7_998))), Verdict::NotOurs);
        assert_eq!(judge(&at(None)), Verdict::Unknown);
        assert_eq!(judge(&seen(false, false, 0)), Verdict::NotYet);
    }
}
