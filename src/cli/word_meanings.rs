//! Meaning of the words in plans, tables and refusals, with the action that follows, for `abide explain WORD`.
//!
//! Held reasons, sync and health states are matched exhaustively: a new word does not compile without its meaning.

use super::Exit;
use crate::gse::{envelope_code_meanings, row_code_meanings};
use crate::model::HoldReason::{
    AgentRelaunching, AwaitingPromotion, BackingOff, DeleteBudget, FollowOff, HealOff, Hold, HostUnknown,
    IdentityMix, MaxUnavailable, MoveUnsupported, NoStopCommand, NotConverging, NotOwned, OldSpecUnknown,
    OutsideWindow, Paused, PolicyViolated, Protected, RestartBudget, RolledBack, RolloutAborted,
    RunInProgress, RunUnknown, SecretKeyUnknown, SourceUnreadable, Stale, UnderWay, Unsupported,
    WaitingForDependency,
};
use crate::model::{Health, HoldReason, SyncStatus};

/// Meaning of a word or number in one of its uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordMeaning {
    pub word: String,
    /// The column or report that has the word.
    pub used_as: &'static str,
    pub meaning: String,
    /// The next command or decision of the operator; `None`: nothing to do.
    pub action: Option<&'static str>,
}

/// Every use of a word. A held reason may also be the reason of a refusal.
pub fn meanings(word: &str) -> Vec<WordMeaning> {
    let is_word = |known: &WordMeaning| known.word.eq_ignore_ascii_case(word);
    all_words().into_iter().chain(codes()).filter(is_word).collect()
}

/// All words, without the numeric codes.
pub fn all_words() -> Vec<WordMeaning> {
    let held = HoldReason::ALL.into_iter().map(held_reason);
    let sync = SyncStatus::ALL.into_iter().map(sync_status);
    let health = Health::ALL.into_iter().map(health);
    held.chain(sync).chain(health).chain(hosting()).chain(refusals()).collect()
}

fn entry(
    word: &str,
    used_as: &'static str,
    meaning: &str,
    action: impl Into<Option<&'static str>>,
) -> WordMeaning {
    WordMeaning { word: word.to_owned(), used_as, meaning: meaning.to_owned(), action: action.into() }
}

fn held_reason(reason: HoldReason) -> WordMeaning {
    entry(reason.word(), "held reason", held_meaning(reason), held_action(reason))
}

/// The meaning of a held reason.
fn held_meaning(reason: HoldReason) -> &'static str {
    match reason {
        HostUnknown => "The host could not be observed, so nothing is planned on it.",
        Stale => "The last report of the instance is older than --stale-after.",
        Hold => "A person operated the instance manually, and its hold is not released.",
        Paused => "A person paused the namespace or the target.",
        Protected => "The process is protected against this operation, also if its manifest was deleted.",
        NotOwned => "The process exists, and this owner neither started nor registered it.",
        OutsideWindow => "A Policy allows the operation only inside a window, or forbids it inside one.",
        DeleteBudget => "The plan removes more instances than the delete budget allows.",
        RestartBudget => "The plan restarts more instances than the restart budget allows.",
        WaitingForDependency => "A process in `depends_on` has not ended with success, or is not healthy.",
        IdentityMix => "The supervised process and the running process have different identities.",
        Unsupported => "The target does not support a field of the spec that affects the process.",
        NoStopCommand => "The target cannot send signals, and the spec has neither stop_cmd nor kill_cmd.",
        RunInProgress => {
            "A run of the one-shot or schedule is in progress, and a plan never stops a run to begin another."
        }
        RunUnknown => "The result of the one-shot is unknown, so the plan does not start it again.",
        AgentRelaunching => "The process exited, and its agent relaunches it.",
        OldSpecUnknown => {
            "The operation needs the spec that the process was started with, and no state contains it."
        }
        MoveUnsupported => "The target cannot rename a process, so `moved_from` has no effect.",
        BackingOff => {
            "An operation failed, or the agent gave up. The message has the time of the next attempt."
        }
        NotConverging => "The same operations succeeded three times, and each time the difference returned.",
        RolledBack => "A rollout of this version failed and was rolled back.",
        UnderWay => "An earlier plan for the instance is in flight, or its rollout soaks.",
        HealOff => "The watch runs with --heal no: drift is not repaired.",
        FollowOff => "The watch runs with --follow no: manifest changes are not applied.",
        SourceUnreadable => "A manifest or a stored source cannot be read, so nothing is removed.",
        PolicyViolated => "The policy file of the control host does not allow the change.",
        AwaitingPromotion => "The rollout waits for a promotion.",
        SecretKeyUnknown => {
            "This caller cannot read the key of the secret digests, so it cannot compare the specs."
        }
        RolloutAborted => "A person aborted the rollout of this version.",
        MaxUnavailable => "Too many instances of the group are unavailable.",
    }
}

/// The action that ends it.
fn held_action(reason: HoldReason) -> &'static str {
    match reason {
        HostUnknown => "Check the host, its agent and the network: `abide get hosts`, `abide doctor`.",
        Stale => "Restart the agent; on GSE check the host. Check the clocks: `abide get hosts`.",
        Hold => {
            "`abide get holds` shows who and why; `abide release NS/NAME` ends it, --override-holds ignores it once."
        }
        Paused => "`abide resume NAMESPACE`, or wait for the end of the pause: `abide get holds`.",
        Protected => "Remove `protect:` in a commit of its own, or `abide unprotect NS/NAME --reason TEXT`.",
        NotOwned => {
            "`--adopt` takes it over without a restart; else stop it where it was started, or transfer it: `abide own`."
        }
        OutsideWindow => {
            "Wait for the window, or change it in a commit. In an emergency: --break-glass --reason TEXT."
        }
        DeleteBudget => {
            "Check the plan: often a directory is missing. Then raise --max-delete or the limit in the Policy."
        }
        RestartBudget => "Check the plan, then raise --max-restart or the limit in the Policy.",
        WaitingForDependency => "Check the named dependency: `abide describe NS/NAME`, `abide logs NS/NAME`.",
        IdentityMix => "`abide stop NS/NAME`, then apply; or stop one of the two manually.",
        Unsupported => "Use a target of dialect abide, or remove the field.",
        NoStopCommand => "Add a stop_cmd; stop the running process manually once.",
        RunInProgress => "Wait until the run ends.",
        RunUnknown => {
            "Find out whether it ran. If not: `abide start NS/NAME`. If so: change one of its fields to run it again."
        }
        AgentRelaunching => "`abide logs NS/NAME` and `abide describe NS/NAME` show why it exits.",
        OldSpecUnknown => {
            "A deeper clone of the manifests may have it; else stop the process with the platform's tools, then apply."
        }
        MoveUnsupported => "Remove `moved_from`, and use --prune for the old process.",
        BackingOff => "`abide describe NS/NAME` shows the cause. A changed manifest is applied at once.",
        NotConverging => {
            "Find what undoes it: `abide audit -n NAMESPACE --since 1h`. A changed manifest resumes the attempts."
        }
        RolledBack => "Fix or revert the commit; `abide history` shows the reason.",
        UnderWay => "Wait until the earlier plan ends.",
        HealOff => "`abide apply PATH`, or run the watch with --heal yes.",
        FollowOff => "`abide apply PATH`, or run the watch with --follow yes.",
        SourceUnreadable => "`abide validate PATH` names the error.",
        PolicyViolated => "Change the manifest, or ask the owner of the --policy file to allow the change.",
        AwaitingPromotion => {
            "Check the changed instances, then `abide rollout promote NS/NAME`; or `abort` or `undo`."
        }
        SecretKeyUnknown => "Use an app of role operate, or one of role read whose `owners` has the owner.",
        RolloutAborted => "`abide rollout promote NS/NAME` resumes it; or apply another version.",
        MaxUnavailable => "Repair the unavailable instances: `abide get processes`, `abide logs NS/NAME`.",
    }
}

fn sync_status(status: SyncStatus) -> WordMeaning {
    let (meaning, action) = match status {
        SyncStatus::InSync => ("The process is registered and running as its manifest declares.", None),
        SyncStatus::OutOfSync => (
            "The process differs from its manifest.",
            Some("`abide describe NS/NAME` shows the next operation, `abide diff PATH` the fields."),
        ),
        SyncStatus::Unknown => (
            "The process was not observed, or no revision is active to compare with.",
            Some("`abide get hosts` for the host; `abide apply PATH` activates a revision."),
        ),
        SyncStatus::Held => (
            "The process differs from its manifest, and the difference is held.",
            Some("`abide describe NS/NAME` names the held reason; `abide explain REASON` explains it."),
        ),
        SyncStatus::Paused => ("Its namespace or the target is paused.", Some("`abide resume NAMESPACE`.")),
        SyncStatus::Orphan => (
            "No manifest declares the process, or it has no owner.",
            Some(
                "`abide get orphans` shows why. --prune removes orphans of the owner, --adopt takes over processes without one.",
            ),
        ),
    };
    entry(status.word(), "SYNC", meaning, action)
}

fn health(health: Health) -> WordMeaning {
    let (meaning, action) = match health {
        Health::Healthy => {
            ("The process runs, and its health check, if any, succeeds; a one-shot ended with success.", None)
        }
        Health::Starting => {
            ("The process runs within its start period, and its health check has not succeeded yet.", None)
        }
        Health::Degraded => (
            "The health check of the running process fails.",
            Some("`abide describe NS/NAME` shows the output of the last probe."),
        ),
        Health::Failed => (
            "The agent could not keep the process running, or a run ended without success.",
            Some("`abide logs NS/NAME` and `abide describe NS/NAME` show the last exits."),
        ),
        Health::Unknown => ("The agent of the host does not answer.", Some("`abide get hosts`.")),
        Health::NotReported => ("The target reports no health, or the process does not run.", None),
    };
    entry(health.word(), "HEALTH", meaning, action)
}

fn hosting() -> [WordMeaning; 2] {
    [
        entry("Hosted", "HOSTING", "The agent supervises the process: it relaunches it after a crash.", None),
        entry("NotHosted", "HOSTING", "The agent does not supervise the process: a crash ends it.", None),
    ]
}

/// Words of `exit.reason` that are not held reasons.
fn refusals() -> Vec<WordMeaning> {
    let refused = |word, meaning, action: &'static str| entry(word, "reason of exit code 4", meaning, action);
    vec![
        refused(
            "NoApproval",
            "The plan needs an approval, and there is no terminal to ask.",
            "Check the plan, then --yes.",
        ),
        refused(
            "StalePlan",
            "The manifests or the observed state changed since the plan.",
            "Plan again, and review the new plan.",
        ),
        refused(
            "SourceChanged",
            "The owner was last applied from another source, and --prune would compare with this one.",
            "--accept-source takes the new source; or use another owner.",
        ),
        refused(
            "OwnerNotNamed",
            "--prune on a shared target needs an owner other than the default.",
            "--owner NAME, or `owner:` in a Policy.",
        ),
        refused(
            "EmptySet",
            "The path declares no process.",
            "Check the path; `state: absent` removes processes on purpose.",
        ),
        refused(
            "InventoryUnknown",
            "An inventory could not be read, or has no hosts, and no earlier read of it is stored.",
            "`abide inventory show NAME` shows the cause; `inventories` in the config file defines it.",
        ),
        refused(
            "OtherController",
            "A running watch of the same owner would undo the change.",
            "Commit the change to its source, stop that watch, or --force.",
        ),
        refused(
            "NotSigned",
            "The policy of the control host requires signatures that the plan does not have, or the plan changed.",
            "`abide plan PATH --out FILE`, then `abide plan sign FILE --key KEY` by each person.",
        ),
        entry(
            "Forbidden",
            "reason of exit code 77",
            "The credential lacks a grant.",
            "`abide access check APP VERB NS/NAME`.",
        ),
    ]
}

/// Result codes of operations, error codes of calls, and exit codes.
fn codes() -> Vec<WordMeaning> {
    let row = |(code, meaning): (i64, &'static str)| {
        entry(&code.to_string(), "result code of an operation", meaning, None)
    };
    let call = |(code, meaning): (i64, &'static str)| {
        entry(&code.to_string(), "code of a gateway's answer", meaning, None)
    };
    let exit = |exit: &Exit| entry(&(*exit as u8).to_string(), "exit code", exit.meaning(), None);
    let rows = row_code_meanings().map(row);
    rows.chain(envelope_code_meanings().map(call)).chain(Exit::ALL.iter().map(exit)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_meaning_and_a_sentence_ends() {
        for one in all_words().iter().chain(&codes()) {
            assert!(!one.meaning.is_empty(), "{one:?}");
            assert!(one.action.is_none_or(|action| action.ends_with('.')), "{one:?}");
        }
        assert_eq!(meanings("hostunknown").len(), 1);
        assert_eq!(meanings("Unknown").iter().map(|one| one.used_as).collect::<Vec<_>>(), ["SYNC", "HEALTH"]);
        assert_eq!(meanings("828").len(), 1);
        assert!(meanings("NoSuchWord").is_empty());
    }

    #[test]
    fn the_guide_has_every_held_reason() {
        let guide = include_str!("../../docs/operations.md");
        for reason in HoldReason::ALL {
            assert!(guide.contains(reason.word()), "docs/operations.md does not explain {}", reason.word());
        }
    }
}
