//! Tests of the store schema: bytes of keys, parsing, and the tables of the documentation.

use super::*;

fn instance() -> InstanceKey {
    "0:10.0.0.7:web:api".parse().expect("an instance")
}

/// An upgrade reads the keys of earlier versions: a changed byte here loses their data.
#[test]
fn keys_have_their_documented_bytes() {
    let (instance, owner) = (instance(), "team/ops");
    let host = &instance.host;
    let golden = [
        (registration(&instance), "reg/web/api/0:10.0.0.7"),
        (protection(&instance), "protect/0:10.0.0.7:web:api"),
        (controller(owner), "controller/team/ops"),
        (registrations_prefix("web"), "reg/web/"),
        (report(&instance), "live/web/api/0:10.0.0.7"),
        (failed_start(&instance), "failed/web/api/0:10.0.0.7"),
        (failed_starts_prefix(Some("web")), "failed/web/"),
        (failed_starts_prefix(None), "failed/"),
        (identity(host, "k/1"), "identity/0:10.0.0.7/k/1"),
        (claim(&instance), "claim/0:10.0.0.7/web/api"),
        (group("web", host), "group/web/0:10.0.0.7"),
        (task("t1"), "task/t1"),
        (open_task("t1"), "open/t1"),
        (row_result("t1", 12), "done/t1/12"),
        (missing_rows("t1"), "done/t1/lost"),
        (response("app", "x"), "op/app/x"),
        (TASK_NUMBER.to_owned(), "task-number"),
        (agent_counter("ab12", "one"), "agent/ab12/one"),
        (join_token("0a1b"), "fleet/token/0a1b"),
        (host_pin(host), "fleet/host/0:10.0.0.7"),
        (revoked_certificate("4f"), "fleet/revoked/4f"),
        (PROBE.to_owned(), "probe"),
        (STORE_ID.to_owned(), "store-id"),
        (SECRET_ROOT.to_owned(), "secret-key"),
        (target_prefix("gse"), "at/gse/"),
        (lease(&writer_lease_name(owner)), "lease/writer/team/ops"),
        (lease(&leader_lease_name(owner)), "lease/leader/team/ops"),
        (journal(&journal_run_prefix(owner, "r1"), 7), "journal/team/ops/r1/000007"),
        (ledger("gse", &instance), "ledger/gse/0:10.0.0.7:web:api"),
        (hold(&instance), "hold/0:10.0.0.7:web:api"),
        (pause(None), "pause/*"),
        (pause(Some(&instance.namespace)), "pause/web"),
        (pin(owner), "pin/team/ops"),
        (suspended(owner, &instance), "left/team/ops/0:10.0.0.7:web:api"),
        (alert(owner, "oncall", "failed", "web/api"), "alert/team/ops/oncall:failed:web:api"),
        (active_revision(owner), "source/team/ops/taken"),
        (applied_revision(owner), "source/team/ops/applied"),
        (last_commit(owner), "source/team/ops/git"),
        (snapshots_prefix(owner), "snap/team/ops/rev/"),
        (snapshot_lists_prefix(owner), "snap/team/ops/list/"),
        (snapshot_texts_prefix(owner), "snap/team/ops/text/"),
        (inventory(owner, "cmdb"), "snap/team/ops/inventory/cmdb"),
        (inventory_chunk(owner, "cmdb", "ab12", 7), "snap/team/ops/inventory/cmdb:ab12:0007"),
        (history(owner, "1763424000000-42-3"), "history/team/ops/1763424000000-42-3"),
        (instance_state(&instance), "proc/0:10.0.0.7:web:api"),
        (launch_intent(&instance), "intent/0:10.0.0.7:web:api"),
        (pending_operation(&instance), "pending/0:10.0.0.7:web:api"),
        (result("t1/2"), "up/t1/2"),
        (acknowledged("t1/2"), "ran/t1/2"),
        (FLOOR.to_owned(), "floor"),
        (fence(owner), "fence/team/ops"),
    ];
    for (key, bytes) in golden {
        assert_eq!(key, bytes);
    }
    assert!(CONTROLLER_PREFIXES.is_sorted());
}

#[test]
fn keys_parse_back_into_their_parts() {
    let (instance, owner) = (instance(), "team/ops");
    assert_eq!(instance_of(&registration(&instance)).as_ref(), Some(&instance));
    assert_eq!(instance_of(&report(&instance)).as_ref(), Some(&instance));
    assert_eq!(instance_of(&hold(&instance)), None);
    assert_eq!(instance_of(&failed_start(&instance)), None);
    assert_eq!(failed_start_of(&failed_start(&instance)).as_ref(), Some(&instance));
    assert_eq!(group_of("group/web/0:10.0.0.7"), Some(("web", instance.host.clone())));
    assert_eq!(task_of("task/t1"), Some("t1"));
    assert_eq!(open_task_of("open/open/1"), Some("open/1"));
    assert_eq!(row_of(&row_result("t1", 12), "t1"), Some(12));
    assert_eq!(row_of(&missing_rows("t1"), "t1"), None);
    assert_eq!(join_token_of(&join_token("0a1b")), Some("0a1b"));
    assert_eq!(host_pin_of(&host_pin(&instance.host)).as_ref(), Some(&instance.host));
    assert_eq!(revoked_certificate_of(&revoked_certificate("4f")), Some("4f"));
    assert_eq!(lease_of("lease/lease/a"), Some("lease/a"));
    assert_eq!(lease_name_parts("writer/team/ops"), ("writer", owner));
    assert_eq!(journal_call("journal/team/ops/r1/000007", owner), Some("r1/000007"));
    assert_eq!(ledger_instance(&ledger("gse", &instance), "gse").as_ref(), Some(&instance));
    assert_eq!(pin_owner(&pin(owner)), Some(owner));
    assert_eq!(suspended_instance(&suspended(owner, &instance)).as_ref(), Some(&instance));
    assert_eq!(suspended_instance_of(&suspended(owner, &instance), "team"), None);
    assert_eq!(active_revision_owner(&active_revision(owner)), Some(owner));
    assert_eq!(active_revision_owner(&last_commit(owner)), None);
    assert_eq!(instance_state_of(&instance_state(&instance)).as_ref(), Some(&instance));
}

/// The tables of this module and of `docs/architecture.md` have the same rows.
#[test]
fn documentation_has_the_same_tables() {
    let rows = |text: &str| -> Vec<String> {
        let rows = text.lines().map(|line| line.trim_start_matches("//!").trim());
        rows.filter(|row| row.starts_with("| `")).map(str::to_owned).collect()
    };
    let doc = include_str!("../../../docs/architecture.md");
    let section = doc.split("## Store schema").nth(1).and_then(|rest| rest.split("\n## ").next());
    let code = include_str!("../keys.rs").split("\nuse ").next().unwrap_or_default();
    assert_eq!(rows(code), rows(section.expect("the section")));
}
