//! Signed plans: which applies a policy refuses, and which signatures count, with real ssh keys.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::support::{needs, needs_root, stderr, stdout};

/// A change of a plan, and what it changes.
type NamedChange = (&'static str, fn(&mut Value));

/// A machine with a process, a policy that requires two signatures, and keys of Ann, Bob and Eve. Eve may
/// sign for another purpose.
struct Desk {
    machine: Machine,
}

impl Desk {
    fn new() -> Option<Desk> {
        if !needs("ssh-keygen") {
            return None;
        }
        let desk = Desk { machine: Machine::new() };
        let line = |name: &str| format!("{name}@example.org {}", desk.public(name));
        for name in ["ann", "ann2", "bob", "eve"] {
            desk.make_key(name);
        }
        let second = format!("ann@example.org namespaces=\"abide-plan\" {}", desk.public("ann2"));
        let other = format!("eve@example.org namespaces=\"git\" {}", desk.public("eve"));
        desk.write("signers", &format!("{}{second}{}{other}", line("ann"), line("bob")));
        desk.write(
            "policy.yaml",
            "meta: {name: four-eyes}\nsignatures: {allowed_signers: signers, required: 2}\n",
        );
        desk.machine.process("a", "1", "");
        Some(desk)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.machine.path(name), text).expect("a file");
    }

    fn make_key(&self, name: &str) {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"])
            .arg(self.machine.path(name))
            .stdin(Stdio::null())
            .status();
        assert!(made.expect("ssh-keygen runs").success());
    }

    fn public(&self, name: &str) -> String {
        std::fs::read_to_string(self.machine.path(&format!("{name}.pub"))).expect("a key")
    }

    fn plan(&self) {
        let (code, _, err) = self.machine.run(&["plan", "m", "--out", "plan.json"]);
        assert_eq!(code, 0, "{err}");
    }

    fn sign(&self, key: &str, more: &[&str]) -> (i32, String, String) {
        self.machine.run(&[&["plan", "sign", "plan.json", "--key", key], more].concat())
    }

    fn signed(&self, keys: &[&str]) {
        self.plan();
        for key in keys {
            let (code, _, err) = self.sign(key, &[]);
            assert_eq!(code, 0, "{err}");
        }
    }

    fn apply(&self, more: &[&str]) -> (i32, String, String) {
        self.machine.run(&[&["apply", "plan.json", "--policy", "policy.yaml"], more].concat())
    }

    /// Nothing was applied, for this reason.
    #[track_caller]
    fn refuses(&self, more: &[&str], why: &str) {
        let (code, out, err) = self.apply(&[more, &["-o", "json"]].concat());
        assert!(code == 4 && err.contains(why), "{why:?}: {code} {err}");
        assert_eq!(
            serde_json::from_str::<Value>(&out).expect("JSON")["exit"],
            json!({"code": 4, "reason": "NotSigned"})
        );
        assert!(self.machine.effects().is_empty());
    }

    fn read(&self) -> Value {
        let text = std::fs::read_to_string(self.machine.path("plan.json")).expect("a plan");
        serde_json::from_str(&text).expect("JSON")
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut plan = self.read();
        change(&mut plan);
        self.write("plan.json", &plan.to_string());
    }
}

#[test]
fn a_plan_that_two_persons_signed_is_applied_and_the_history_names_them() {
    let Some(desk) = Desk::new() else { return };
    let machine = &desk.machine;
    let (code, _, err) = machine.run(&["apply", "m", "--yes", "--policy", "policy.yaml"]);
    assert!(
        code == 4 && err.contains("requires 2 signatures for target local, owner \"default\""),
        "{code} {err}"
    );
    assert!(err.contains("abide plan sign"), "{err}");
    desk.plan();
    desk.refuses(&[], "the plan has no signature");
    let (code, out, err) = desk.sign("ann", &["--expires", "1h"]);
    assert!(
        code == 0 && out.contains("start 0:127.0.0.1:web:a") && out.contains("target local, owner default"),
        "{out}"
    );
    assert!(err.contains("it has 1 signature and expires at 20"), "{err}");
    desk.refuses(&[], "the plan has 1 valid signature, by ann@example.org");
    // The same key, and another key of the same person.
    let (code, _, err) = desk.sign("ann", &[]);
    assert!(code == 0 && err.contains("already"), "{code} {err}");
    assert_eq!(desk.sign("ann2", &[]).0, 0);
    desk.refuses(&[], "the plan has 1 valid signature, by ann@example.org");
    // Eve's key is for another purpose.
    assert_eq!(desk.sign("eve", &[]).0, 0);
    desk.refuses(&[], "the plan has 1 valid signature, by ann@example.org; the signature of key SHA256:");
    let (code, _, err) = desk.sign("bob", &["--expires", "2h"]);
    assert!(code == 64 && err.contains("--expires cannot change a plan that is signed"), "{code} {err}");
    assert_eq!(desk.sign("bob", &[]).0, 0);
    assert_eq!(desk.read()["signatures"].as_array().map(Vec::len), Some(4));
    let (code, _, err) = desk.apply(&[]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(machine.effects(), ["start a 1"]);
    let (_, out, _) = machine.run(&["history", "-o", "json"]);
    let history: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(history[0]["signed_by"], json!(["ann@example.org", "bob@example.org"]));
    let (_, out, _) = machine.run(&["history"]);
    assert!(out.contains("signed by ann@example.org") && out.contains("bob@example.org"), "{out}");
    // Once applied, the state is another one.
    let (code, _, err) = desk.apply(&[]);
    assert!(code == 4 && err.contains("the observed state or the flags changed"), "{code} {err}");
}

#[test]
fn a_changed_or_expired_plan_is_refused() {
    let Some(desk) = Desk::new() else { return };
    let both = ["ann", "bob"];
    let changes: [NamedChange; 6] = [
        ("a step", |plan| plan["waves"][0][0]["op"] = json!("stop")),
        ("a flag", |plan| plan["inputs"]["flags"]["prune"] = json!(true)),
        ("the paths", |plan| plan["inputs"]["paths"] = json!(["other"])),
        ("the fingerprint", |plan| plan["fingerprint"] = json!("0")),
        ("a note", |plan| plan["notes"] = json!(["reviewed"])),
        ("the expiry", |plan| plan["expires"] = json!("2999-01-01T00:00:00Z")),
    ];
    std::fs::create_dir_all(desk.machine.path("other")).expect("a folder");
    std::fs::copy(desk.machine.path("m/a.yaml"), desk.machine.path("other/a.yaml")).expect("a file");
    for (what, change) in changes {
        desk.signed(&both);
        desk.change(change);
        let (code, _, err) = desk.apply(&[]);
        assert!(
            code == 4 && err.contains("the plan was changed after it was signed"),
            "{what}: {code} {err}"
        );
    }
    // The expiry of a plan counts without a policy, too.
    desk.signed(&[]);
    desk.change(|plan| plan["expires"] = json!("2026-01-01T00:00:00Z"));
    desk.refuses(&[], "the plan expired");
    let (code, _, err) = desk.machine.run(&["apply", "plan.json"]);
    assert!(code == 4 && err.contains("the plan expired"), "{code} {err}");
    desk.signed(&["ann"]);
    desk.change(|plan| plan["expires"] = json!("2026-01-01T00:00:00Z"));
    let (code, _, err) = desk.sign("bob", &[]);
    assert!(code == 64 && err.contains("the plan expired"), "{code} {err}");
    // Signatures without an expiry, and others than those of ssh-keygen.
    desk.signed(&both);
    desk.change(|plan| drop(plan.as_object_mut().expect("a map").remove("expires")));
    desk.refuses(&[], "the plan has no expiry");
    desk.signed(&["ann"]);
    desk.change(|plan| plan["signatures"] = json!([plan["signatures"][0], "forged", 7]));
    desk.refuses(
        &[],
        "the plan has 1 valid signature, by ann@example.org; a signature is not in the format of ssh-keygen",
    );
    assert!(desk.machine.effects().is_empty());
    // Another form of the same plan is the same plan.
    desk.signed(&both);
    desk.change(|_| {});
    assert_eq!(desk.apply(&[]).0, 0);
}

#[test]
fn a_plan_that_showed_its_signers_something_else_is_refused() {
    let Some(desk) = Desk::new() else { return };
    let sign = || {
        for key in ["ann", "bob"] {
            let (code, _, err) = desk.sign(key, &[]);
            assert_eq!(code, 0, "{err}");
        }
    };
    // Changed before it is signed; the fingerprint and the steps are the real ones.
    let changes: [NamedChange; 9] = [
        ("version", |plan| plan["version"] = json!(2)),
        ("source", |plan| plan["source"]["revision"] = json!("0000")),
        ("source", |plan| plan["source"]["path"] = json!("reviewed")),
        ("id", |plan| plan["id"] = json!("0000")),
        ("summary", |plan| plan["summary"]["start"] = json!(7)),
        ("waves", |plan| plan["waves"][0][0]["why"] = json!([])),
        ("held", |plan| plan["held"] = json!([{"instance": "0:127.0.0.1:web:b"}])),
        ("notes", |plan| plan["notes"] = json!(["reviewed"])),
        ("gates", |plan| plan["gates"] = json!([{"after_wave": 1}])),
    ];
    for (field, change) in changes {
        desk.plan();
        desk.change(change);
        sign();
        desk.refuses(
            &[],
            &format!("field {field:?} of the signed plan differs from the plan that is made now"),
        );
    }
    // Everything but the fingerprint is of a plan for other manifests.
    desk.plan();
    let shown = desk.read();
    desk.machine.process("a", "2", "");
    desk.plan();
    let fingerprint = desk.read()["fingerprint"].clone();
    desk.change(|plan| {
        *plan = shown;
        plan["fingerprint"] = fingerprint;
    });
    sign();
    desk.refuses(&[], "field \"source\" of the signed plan");
    desk.signed(&["ann", "bob"]);
    let (code, _, err) = desk.apply(&[]);
    assert_eq!((code, desk.machine.effects()), (0, vec!["start a 2".to_owned()]), "{err}");
}

#[test]
fn a_signed_plan_is_applied_once() {
    let Some(desk) = Desk::new() else { return };
    let machine = &desk.machine;
    // The second and later states of a version are equal.
    for version in ["1", "2", "1"] {
        machine.process("a", version, "");
        assert_eq!(machine.apply(&[]).0, 0);
    }
    machine.process("a", "2", "");
    desk.signed(&["ann", "bob"]);
    let (code, _, err) = desk.apply(&[]);
    assert_eq!(code, 0, "{err}");
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("a", "2", "");
    let effects = machine.effects();
    let (code, _, err) = desk.apply(&[]);
    assert!(code == 4 && err.contains("the signed plan was already applied at 20"), "{code} {err}");
    assert_eq!(machine.effects(), effects);
}

#[test]
fn signers_see_flags_and_reasons_and_set_the_expiry() {
    let Some(desk) = Desk::new() else { return };
    let far = |plan: &mut Value| plan["expires"] = json!("2999-01-01T00:00:00Z");
    let flags = ["--override-holds", "--break-glass", "--reason", "hotfix"];
    let (code, _, err) = desk.machine.run(&[&["plan", "m", "--out", "plan.json"], &flags[..]].concat());
    assert_eq!(code, 0, "{err}");
    desk.change(far);
    let (code, _, err) = desk.sign("ann", &["--expires", "31d"]);
    assert!(code == 64 && err.contains("must expire within 30 days"), "{code} {err}");
    let (code, out, err) = desk.sign("ann", &[]);
    assert_eq!(code, 0, "{err}");
    let (plan, reason) = (desk.read(), "flag break_glass: \"hotfix\"");
    let expires = plan["expires"].as_str().expect("an expiry");
    assert_eq!(plan["waves"][0][0]["why"][0]["rule"], "NotRunning");
    assert!(!expires.starts_with("2999"), "{expires}");
    for text in [expires, "flag override_holds: true", reason, "    not running\n"] {
        assert!(out.contains(text), "{text:?} is not in {out}");
    }
    assert!(!out.contains("flag prune"), "{out}");
    // The signature of ann does not cover this expiry, and bob does not sign it.
    desk.change(far);
    let (code, _, err) = desk.sign("bob", &[]);
    assert!(code == 64 && err.contains("must expire within 30 days"), "{code} {err}");
    desk.plan();
    let (code, _, err) = desk.apply(&["--break-glass", "--reason", "x"]);
    assert!(code == 64 && err.contains("--break-glass"), "{code} {err}");
    assert!(desk.machine.effects().is_empty());
}

#[test]
fn a_plan_for_another_state_owner_or_target_is_refused() {
    let Some(desk) = Desk::new() else { return };
    desk.signed(&["ann", "bob"]);
    desk.machine.process("a", "2", "");
    let (code, _, err) = desk.apply(&[]);
    assert!(code == 4 && err.contains("the plan is stale: the manifests changed"), "{code} {err}");
    let (code, _, err) = desk.apply(&["--owner", "other"]);
    assert!(code == 64 && err.contains("this plan is for owner \"default\", not \"other\""), "{code} {err}");
    // A signed plan of another owner, with this owner written into its header.
    let (code, _, err) = desk.machine.run(&["plan", "m", "--out", "plan.json", "--owner", "shop"]);
    assert_eq!(code, 0, "{err}");
    desk.change(|plan| plan["owner"] = json!("default"));
    assert_eq!(desk.sign("ann", &[]).0, 0);
    assert_eq!(desk.sign("bob", &[]).0, 0);
    desk.refuses(&[], "the plan is for owner \"default\", not \"shop\"");
    desk.change(|plan| (plan["owner"], plan["target"]) = (json!("shop"), json!("prod")));
    desk.refuses(&[], "the plan is for target \"prod\", not \"local\"");
    // The rule is for other owners and targets.
    desk.write(
        "policy.yaml",
        "meta: {name: p}\nsignatures: {allowed_signers: signers, targets: [\"prod*\"], owners: [shop]}\n",
    );
    assert_eq!(desk.machine.apply(&["--policy", "policy.yaml"]).0, 0);
}

#[test]
fn rollbacks_and_controllers_need_signatures_too() {
    let Some(desk) = Desk::new() else { return };
    let machine = &desk.machine;
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("a", "2", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let effects = machine.effects();
    for args in [
        &["rollback", "--to", "previous", "--yes", "--policy", "policy.yaml"][..],
        &[
            "rollback",
            "--to",
            "previous",
            "--yes",
            "--policy",
            "policy.yaml",
            "--break-glass",
            "--reason",
            "x",
        ],
        &["watch", "m", "--policy", "policy.yaml", "--listen", "127.0.0.1:0"],
    ] {
        let (code, _, err) = machine.run(args);
        assert!(
            code == 4 && err.contains("owner \"default\"") && err.contains("sign"),
            "{args:?}: {code} {err}"
        );
    }
    assert_eq!(machine.effects(), effects);
}

#[test]
fn sign_and_the_policy_name_what_is_wrong() {
    let Some(desk) = Desk::new() else { return };
    let expect = |args: &[&str], code: i32, text: &str| {
        let (got, _, err) = desk.machine.run(args);
        assert!(got == code && err.contains(text), "{args:?}: {got} {err}");
    };
    expect(&["plan", "sign", "m/a.yaml", "--key", "ann"], 64, "is not a saved plan");
    expect(&["plan", "sign", "none.json", "--key", "ann"], 1, "No such file");
    desk.plan();
    expect(&["plan", "sign", "plan.json", "--key", "none"], 1, "cannot sign with none: ssh-keygen: ");
    expect(&["plan", "sign", "plan.json"], 64, "--key");
    assert!(desk.read()["signatures"].is_null(), "a failed signature changes nothing");
    for (text, why) in [
        ("{allowed_signers: signers, required: 0}", "signatures.required is 0"),
        ("{allowed_signers: signers, owners: []}", "signatures.owners is empty"),
        ("{allowed_signers: signers, targets: []}", "signatures.targets is empty"),
        ("{allowed_signers: none}", "is not a file"),
        ("{required: 2}", "allowed_signers"),
        ("{allowed_signers: signers, sign: 2}", "unknown field"),
    ] {
        desk.write("policy.yaml", &format!("meta: {{name: p}}\nsignatures: {text}\n"));
        expect(&["apply", "plan.json", "--policy", "policy.yaml"], 64, why);
    }
    // Who can change the signers can sign.
    use std::os::unix::fs::PermissionsExt;
    desk.write("policy.yaml", "meta: {name: p}\nsignatures: {allowed_signers: signers}\n");
    desk.signed(&["ann"]);
    std::fs::set_permissions(desk.machine.path("signers"), std::fs::Permissions::from_mode(0o666))
        .expect("a mode");
    desk.refuses(&[], "allowed_signers");
    std::fs::set_permissions(desk.machine.path("signers"), std::fs::Permissions::from_mode(0o644))
        .expect("a mode");
    assert_eq!(desk.apply(&[]).0, 0, "one signature is enough");
}

/// Runs a command where the policy of the host is `policy.yaml` of this folder, after `change`.
fn on_host(desk: &Desk, change: &str, args: &[&str]) -> (i32, String) {
    let script = format!(
        "mkdir -p /etc/abide && mount -t tmpfs -o mode=755 none /etc/abide && cp policy.yaml signers /etc/abide/ && \
         {change} && exec \"$@\""
    );
    let inner = desk.machine.command(args);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &script, "sh"]).arg(inner.get_program()).args(inner.get_args());
    command.current_dir(desk.machine.path(""));
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.stdin(Stdio::null()).output().expect("unshare runs");
    (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
}

/// The person who applies can neither leave it out nor name a weaker one.
#[test]
fn the_policy_of_the_host_always_holds() {
    if !needs_root() || !needs("unshare") {
        return;
    }
    let Some(desk) = Desk::new() else { return };
    desk.write("weak.yaml", "meta: {name: weak}\n");
    desk.write("team.yaml", "meta: {name: team}\nowner: team\n");
    desk.signed(&["ann"]);
    for (change, args, code, why) in [
        (
            "true",
            &["apply", "m", "--yes"][..],
            4,
            "policy \"four-eyes\" (/etc/abide/policy.yaml) requires 2 signatures",
        ),
        ("true", &["apply", "m", "--yes", "--policy", "weak.yaml"], 4, "requires 2 signatures"),
        ("true", &["apply", "plan.json"], 4, "the plan has 1 valid signature, by ann@example.org"),
        ("true", &["watch", "m", "--listen", "127.0.0.1:0"], 4, "requires signed plans"),
        (
            "true",
            &["plan", "m", "--policy", "team.yaml"],
            4,
            "policy \"team\" (team.yaml) does not allow owner",
        ),
        ("true", &["plan", "m", "--policy", "/etc/abide/policy.yaml"], 0, "1 to start"),
        ("chown nobody /etc/abide/policy.yaml", &["plan", "m"], 64, "belongs to user nobody"),
        ("chmod 666 /etc/abide/signers", &["apply", "plan.json"], 4, "writable by every user"),
        (
            "rm /etc/abide/policy.yaml && ln -s none /etc/abide/policy.yaml",
            &["plan", "m"],
            64,
            "No such file",
        ),
    ] {
        let (found, text) = on_host(&desk, change, args);
        assert!(found == code && text.contains(why), "{change} {args:?}: {found} {text}");
    }
    assert!(desk.machine.effects().is_empty());
    assert_eq!(desk.sign("bob", &[]).0, 0);
    let (code, text) = on_host(&desk, "true", &["apply", "plan.json", "--policy", "weak.yaml"]);
    assert!(code == 0 && text.contains("converged"), "{code} {text}");
}
