//! Two teams with scoped apps on one gateway, with real agents and processes: each uses the whole command line for its own
//! processes, and neither sees or changes anything of the other.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::fixtures::machine::{KillOnDrop, start_logged};
use crate::fixtures::workspace::Workspace;
use crate::server::Server;
use crate::support::{command, stderr, stdout, until};
use crate::system::{is_alive, whoami};

const FORBIDDEN: i32 = 77;

/// A gateway, an agent for each of two hosts, and a folder for each team.
struct Teams {
    folder: Workspace,
    server: Server,
    _agents: Vec<KillOnDrop>,
}

impl Teams {
    fn new() -> Teams {
        let folder = Workspace::new();
        let me = whoami();
        let apps = format!(
            "apps:
  - {{code: all, secret: s3cret}}
  - {{code: red-app, secret: red-s3cret, role: operate, namespaces: [red], owners: [red-team], users: [{me}], hosts: ['0:127.0.0.1', '0:127.0.0.2']}}
  - {{code: blue-app, secret: blue-s3cret, role: operate, namespaces: [blue], owners: [blue-team], users: [{me}], hosts: ['0:127.0.0.2']}}
  - {{code: red-bare, secret: red-s3cret, role: operate, namespaces: [red]}}
  - {{code: red-other, secret: red-s3cret, role: operate, namespaces: [red], owners: [red-team], users: [nobody]}}
  - {{code: red-reader, secret: red-s3cret, role: read, namespaces: [red], owners: [red-team], users: [{me}]}}
"
        );
        let server =
            Server::start(&folder.path().join("store.db"), Duration::from_secs(10), &apps, "* token\n");
        let mut teams = Teams { folder, server, _agents: Vec::new() };
        std::fs::write(teams.path("token"), "token\n").expect("a token");
        for (nth, host) in ["0:127.0.0.1", "0:127.0.0.2"].into_iter().enumerate() {
            let url = format!("http://{}", teams.server.address);
            let data = format!("agent-{nth}");
            let args = ["agent", "--join", &url, "--token-file", "token", "--data", &data, "--as-host", host];
            let log = teams.path(&format!("agent-{nth}.log"));
            teams._agents.push(start_logged(&mut command(&args, teams.folder.path()), &log));
        }
        teams.declare("red", "127.0.0.1", 1);
        teams.declare("blue", "127.0.0.2", 1);
        teams.target("red", "red-app", "red-s3cret");
        teams.target("blue", "blue-app", "blue-s3cret");
        until("both agents are connected", || {
            teams.server.call("GET", "/api/abide/v1/hosts", Value::Object(Default::default()))["data"]
                .as_array()
                .is_some_and(|hosts| hosts.len() == 2 && hosts.iter().all(|host| host["agent"] == true))
        });
        teams
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn target(&self, team: &str, app: &str, secret: &str) {
        let config = format!(
            "owner: {team}-team\ntargets:\n  it: {{url: 'http://{}', dialect: abide, auth: {{app_code: {app}, app_secret: {{file: secret}}}}}}\n",
            self.server.address
        );
        std::fs::write(self.path(team).join("abide.yaml"), config).expect("a file");
        std::fs::write(self.path(team).join("secret"), secret).expect("a file");
    }

    /// A process that prints its team and a version.
    fn declare(&self, team: &str, host: &str, version: u32) {
        let folder = self.path(team);
        std::fs::create_dir_all(folder.join("m")).expect("a folder");
        let (here, me) = (folder.display(), whoami());
        let manifest = format!(
            "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: {team}, name: {team}-api}}\nhosts: [{{ip: {host}, bk_cloud_id: 0}}]\nprotect: [delete]\nspec:\n  \
             identity: {{proc_name: {team}-api, setup_path: {here}, pid_path: {here}/api.pid, log_path: {here}/api.log, user: {me}, value_key: {team}}}\n  \
             control: {{start_mode: foreground, start_cmd: 'echo {team} version {version}; exec sleep 1000'}}\n  \
             monitor_policy: {{auto_type: 1, start_check_secs: 0}}\n"
        );
        std::fs::write(folder.join("m/api.yaml"), manifest).expect("a manifest");
    }

    fn run(&self, team: &str, args: &[&str]) -> (i32, String) {
        let args = [args, &["--target", "it"]].concat();
        let output = command(&args, &self.path(team)).stdin(Stdio::null()).output().expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
    }

    /// A verb that succeeds, without a word about the other team.
    #[track_caller]
    fn succeeds(&self, team: &str, args: &[&str]) -> String {
        let (code, text) = self.run(team, args);
        assert_eq!(code, 0, "{team}: {args:?}: {text}");
        let other = if team == "red" { "blue" } else { "red" };
        assert!(!text.contains(&format!("{other}-")), "{team}: {args:?} names the other team: {text}");
        text
    }

    /// A verb that is refused with a message that names the grant.
    #[track_caller]
    fn forbidden(&self, team: &str, args: &[&str], grant: &str) {
        let (code, text) = self.run(team, args);
        assert_eq!(code, FORBIDDEN, "{team}: {args:?}: {text}");
        assert!(text.contains(&format!("app {team}-app lacks {grant}")), "{team}: {args:?}: {text}");
    }

    fn pid(&self, team: &str) -> Option<u32> {
        let path = format!("/api/abide/v1/processes?namespace={team}");
        let page = self.server.call("GET", &path, Value::Object(Default::default()));
        page["data"]["items"][0]["pid"].as_u64().map(|pid| pid as u32)
    }
}

#[test]
fn each_team_uses_every_verb_for_its_own_processes() {
    let teams = Teams::new();
    for team in ["red", "blue"] {
        let (process, apply) = (format!("{team}/{team}-api"), ["apply", "m", "--yes"]);
        assert!(teams.succeeds(team, &["plan", "m"]).contains("1 to start"));
        teams.succeeds(team, &apply);
        let first = teams.pid(team).expect("it runs");
        assert!(teams.succeeds(team, &["get", "processes"]).contains(&format!("{team}-api")));
        assert!(teams.succeeds(team, &["describe", &process]).contains(&format!("{team}-team")));
        teams.succeeds(team, &["status"]);
        until("the log has its line", || {
            teams.succeeds(team, &["logs", &process]).contains(&format!("{team} version 1"))
        });
        teams.succeeds(team, &["diff", "m"]);
        teams.succeeds(team, &["doctor"]);
        for kind in ["hosts", "tasks", "holds"] {
            teams.succeeds(team, &["get", kind]);
        }
        teams.succeeds(team, &["stop", &process]);
        until("it ends", || !is_alive(first));
        teams.succeeds(team, &["start", &process]);
        teams.succeeds(team, &["release", &process]);
        teams.succeeds(team, &["pause", team, "--until", "1h"]);
        teams.succeeds(team, &["resume", team]);
        let host = if team == "red" { "127.0.0.1" } else { "127.0.0.2" };
        teams.declare(team, host, 2);
        teams.succeeds(team, &apply);
        until("the new version runs", || {
            teams.succeeds(team, &["logs", &process]).contains(&format!("{team} version 2"))
        });
        let history = teams.succeeds(team, &["history", "-o", "json"]);
        let entries: Vec<Value> = serde_json::from_str(&history).expect("JSON");
        let oldest = entries.last().and_then(|entry| entry["revision"].as_str()).expect("a revision");
        teams.succeeds(team, &["rollback", "--yes", "--to", oldest]);
        teams.succeeds(team, &["rollback", "--unpin"]);
        teams.succeeds(team, &["export"]);
        teams.succeeds(team, &["lease", "list"]);
    }
    // Both run, each with its own state.
    assert!(teams.pid("red").is_some() && teams.pid("blue").is_some());
}

#[test]
fn a_watch_follows_the_manifests_of_its_team() {
    let teams = Teams::new();
    let watch = |team: &str| -> KillOnDrop {
        let args = ["watch", "m", "--target", "it", "--interval", "1s", "--listen", "127.0.0.1:0"];
        start_logged(&mut command(&args, &teams.path(team)), &teams.path(&format!("{team}.log")))
    };
    let (mut red, mut blue) = (watch("red"), watch("blue"));
    until("both start their processes", || teams.pid("red").is_some() && teams.pid("blue").is_some());
    let first = teams.pid("red").expect("a pid");
    teams.declare("red", "127.0.0.1", 2);
    until("red restarts its process", || teams.pid("red").is_some_and(|pid| pid != first));
    let second = teams.pid("red").expect("a pid");
    // Blue's process ends, and its watch or its agent starts it again. Red's is not touched.
    let is_running = |child: &mut Child| matches!(child.try_wait(), Ok(None));
    let killed = teams.pid("blue").expect("a pid");
    crate::system::kill(killed, "KILL");
    until("blue's process is back", || teams.pid("blue").is_some_and(|pid| pid != killed));
    assert_eq!(teams.pid("red"), Some(second));
    assert!(is_running(&mut red.0) && is_running(&mut blue.0));
    for (team, other) in [("red", "blue-"), ("blue", "red-")] {
        let log = std::fs::read_to_string(teams.path(&format!("{team}.log"))).expect("a log");
        assert!(log.contains(&format!("{team}-api")) && !log.contains(other), "{log}");
    }
}

#[test]
fn neither_team_sees_or_changes_the_processes_of_the_other() {
    let teams = Teams::new();
    for team in ["red", "blue"] {
        teams.succeeds(team, &["apply", "m", "--yes"]);
    }
    teams.succeeds("blue", &["stop", "blue/blue-api"]);
    teams.succeeds("blue", &["start", "blue/blue-api"]);
    let before = teams.pid("blue").expect("it runs");
    for verb in ["stop", "start", "restart", "reload", "kill", "logs", "describe"] {
        teams.forbidden("red", &[verb, "blue/blue-api"], "namespace blue");
    }
    for verb in ["pause", "resume"] {
        teams.forbidden("red", &[verb, "blue"], "namespace blue");
        teams.forbidden("red", &[verb, "--all"], "namespace * (all namespaces)");
    }
    let theirs = teams.path("blue/m").display().to_string();
    for args in [&["plan", &theirs][..], &["diff", &theirs], &["apply", &theirs, "--yes"]] {
        teams.forbidden("red", args, "namespace blue");
        teams.forbidden("red", &[args, &["--owner", "blue-team"]].concat(), "owner blue-team");
    }
    teams.forbidden("red", &["history", "--owner", "blue-team"], "owner blue-team");
    teams.forbidden("red", &["rollback", "--yes", "--to", "abc", "--owner", "blue-team"], "owner blue-team");
    teams.forbidden("red", &["lease", "reset", "blue-team", "--force"], "owner blue-team");
    teams.forbidden("blue", &["plan", "../red/m"], "namespace red");
    // Blue may not use the first host.
    teams.declare("blue", "127.0.0.1", 1);
    teams.forbidden("blue", &["apply", "m", "--yes"], "host 0:127.0.0.1");
    // A script reads the code and the reason.
    let (code, text) = teams.run("blue", &["apply", "m", "--yes", "-o", "json", "-q"]);
    assert!(code == FORBIDDEN && text.contains(r#"{"exit":{"code":77,"reason":"Forbidden"}}"#), "{text}");
    teams.declare("blue", "127.0.0.2", 1);
    for kind in ["processes", "orphans", "hosts", "holds", "tasks"] {
        let text = teams.succeeds("red", &["get", kind, "-o", "json"]);
        assert!(!text.contains("blue"), "{kind}: {text}");
    }
    let text = teams.succeeds("red", &["status", "-o", "json"]) + &teams.succeeds("red", &["lease", "list"]);
    assert!(!text.contains("blue"), "{text}");
    // A reader plans, and changes nothing.
    teams.target("red", "red-reader", "red-s3cret");
    teams.succeeds("red", &["plan", "m"]);
    teams.succeeds("red", &["get", "processes"]);
    let (code, text) = teams.run("red", &["apply", "m", "--yes"]);
    assert!(code == FORBIDDEN && text.contains("app red-reader lacks role operate"), "{text}");
    let (code, text) = teams.run("red", &["stop", "red/red-api"]);
    assert!(code == FORBIDDEN && text.contains("app red-reader lacks role operate"), "{text}");
    assert_eq!(teams.pid("blue"), Some(before), "blue's process was not touched");
    teams.succeeds("blue", &["get", "processes"]);
}

/// A refused operation leaves no hold, which would keep controllers from the process.
#[test]
fn a_refused_operation_leaves_the_process_without_a_hold() {
    let teams = Teams::new();
    teams.succeeds("red", &["apply", "m", "--yes"]);
    let before = teams.pid("red").expect("it runs");
    for (app, grant) in [
        ("red-bare", "owner red-team"),
        ("red-reader", "role operate"),
        ("red-other", &format!("user {}", whoami())),
    ] {
        teams.target("red", app, "red-s3cret");
        for verb in ["stop", "start", "restart", "reload", "kill"] {
            let (code, text) = teams.run("red", &[verb, "red/red-api"]);
            let says = format!("app {app} lacks {grant}");
            assert!(code == FORBIDDEN && text.contains(&says), "{app} {verb}: {code} {text}");
        }
    }
    teams.target("red", "red-app", "red-s3cret");
    assert!(teams.succeeds("red", &["get", "holds"]).contains("no holds"));
    assert_eq!(teams.pid("red"), Some(before), "it was not touched");
}

/// A process without an owner belongs to its namespace: other clients registered it.
#[test]
fn a_team_operates_processes_of_its_namespace_that_have_no_owner() {
    let teams = Teams::new();
    let here = teams.path("red");
    let request = |name: &str| {
        serde_json::json!({"meta": {"namespace": name, "name": "loose"}, "op_type": 0, "hosts": [{"ip": "127.0.0.2", "bk_cloud_id": 0}],
            "spec": {"identity": {"proc_name": "loose", "setup_path": here, "pid_path": here.join("loose.pid"), "user": whoami()},
                     "control": {"start_cmd": "exec sleep 1000", "start_mode": "foreground"},
                     "monitor_policy": {"auto_type": 1, "start_check_secs": 0}}})
    };
    teams.server.gse("operate_proc", request("red"));
    until("it runs", || teams.pid("red").is_some());
    let first = teams.pid("red").expect("a pid");
    teams.succeeds("red", &["restart", "red/loose"]);
    until("it is restarted", || teams.pid("red").is_some_and(|pid| pid != first));
    teams.succeeds("red", &["stop", "red/loose"]);
    until("it ends", || teams.pid("red").is_none());
    teams.succeeds("red", &["release", "red/loose"]);
    teams.forbidden("blue", &["start", "red/loose"], "namespace red");
    // No run would resolve a call in its journal.
    let journal = serde_json::json!({"range": {"prefix": "journal/"}});
    let entries = teams.server.call("POST", "/api/abide/v1/state", journal);
    assert_eq!(entries["data"]["entries"], serde_json::json!([]), "{entries}");
}
