//! Manifest sources: another source prunes nothing unless asked, and the history of a repository contains old
//! specs.

use std::path::Path;
use std::process::Stdio;

use crate::apply::{KillOnDrop, Machine};
use crate::dialects::{Daemon, Fleet};
use crate::git;
use crate::support::{command, until};
use crate::system::is_alive;

fn repository(at: &Path, origin: Option<&str>) {
    git::run(at, &["init", "--quiet", "--initial-branch=main"]);
    if let Some(origin) = origin {
        git::run(at, &["remote", "add", "origin", origin]);
    }
}

fn commit(at: &Path, message: &str) {
    git::run(at, &["add", "--all"]);
    git::run(at, &["commit", "--quiet", "-m", message]);
}

#[test]
fn another_source_prunes_nothing_unless_it_is_accepted() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    assert_eq!(machine.apply(&["--prune"]).0, 0);
    let pids = machine.pids();
    // The same files elsewhere, and one of them is missing there.
    std::fs::create_dir(machine.path("other")).expect("a folder");
    std::fs::copy(machine.path("m/a.yaml"), machine.path("other/a.yaml")).expect("a file");
    let here = machine.folder.path().canonicalize().expect("a folder");
    for args in [
        vec!["apply", "other", "--yes", "--prune", "-o", "json"],
        vec!["plan", "other", "--prune", "-o", "json"],
        vec!["watch", "other", "--prune"],
    ] {
        let (code, out, err) = machine.run(&args);
        assert_eq!(code, 4, "{args:?} {out} {err}");
        assert!(args[0] == "watch" || out.contains("SourceChanged"), "{args:?} {out}");
        let both = [here.join("m"), here.join("other")].map(|path| path.display().to_string());
        assert!(both.iter().all(|path| err.contains(path)) && err.contains("--accept-source"), "{err}");
    }
    assert_eq!(machine.run(&["diff", "other", "--prune"]).0, 2, "any error but those of the manifests");
    assert_eq!(machine.pids(), pids);
    // Without --prune the source does not matter; a plan changes nothing.
    assert_eq!(machine.run(&["apply", "other", "--yes"]).0, 0);
    assert_eq!(machine.run(&["plan", "other", "--prune", "--accept-source"]).0, 0);
    assert_eq!(machine.run(&["plan", "other", "--prune"]).0, 4);
    let (code, _, err) = machine.run(&["apply", "other", "--yes", "--prune", "--accept-source"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(machine.pids().into_keys().collect::<Vec<_>>(), ["a"]);
    // Now it is theirs, and the first is the stranger.
    assert_eq!(machine.run(&["apply", "other", "--yes", "--prune"]).0, 0);
    assert_eq!(machine.apply(&["--prune"]).0, 4);
}

#[test]
fn a_repository_is_the_same_source_wherever_it_is_checked_out() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (m, url) = (machine.path("m"), "https://ann:secret@git.example.org/fleet.git");
    repository(&m, Some(url));
    commit(&m, "a");
    assert_eq!(machine.apply(&["--prune"]).0, 0);
    // A clone under another name, with another's credentials.
    git::run(machine.folder.path(), &["clone", "--quiet", "m", "clone"]);
    git::run(&machine.path("clone"), &["remote", "set-url", "origin", "https://bob@git.example.org/fleet"]);
    let (code, _, err) = machine.run(&["apply", "clone", "--yes", "--prune"]);
    assert_eq!(code, 0, "{err}");
    // Another folder of the repository is another source, and no message contains a password.
    std::fs::create_dir(machine.path("clone/sub")).expect("a folder");
    std::fs::copy(m.join("a.yaml"), machine.path("clone/sub/a.yaml")).expect("a file");
    let (code, _, err) = machine.run(&["apply", "clone/sub", "--yes", "--prune"]);
    assert!(
        code == 4 && err.contains("https://git.example.org/fleet//sub") && !err.contains("secret"),
        "{err}"
    );
    // Without a remote it is known by its first commit.
    git::run(&m, &["remote", "remove", "origin"]);
    assert_eq!(machine.apply(&["--prune", "--accept-source"]).0, 0);
    git::run(&machine.path("clone"), &["remote", "remove", "origin"]);
    std::fs::remove_dir_all(machine.path("clone/sub")).expect("a folder");
    let (code, _, err) = machine.run(&["apply", "clone", "--yes", "--prune"]);
    assert_eq!(code, 0, "{err}");
}

#[test]
fn old_specs_are_found_in_the_history_of_the_manifests() {
    let fleet = Fleet::new("gse-v2");
    let mut a = Daemon::new("a");
    fleet.write(&a);
    let m = fleet.path("m");
    repository(&m, None);
    commit(&m, "the first");
    fleet.well("it is new", &[]);
    let first = fleet.pid("a").expect("a pid");
    // Another identity, from a disk that knows nothing.
    let forget = || std::fs::remove_dir_all(fleet.path(".abide-home")).expect("a folder");
    a.pid_file = "second";
    fleet.write(&a);
    forget();
    std::fs::rename(m.join(".git"), fleet.path("history")).expect("a folder");
    let (code, out, err) = fleet.apply(&["-o", "json"]);
    assert!(code == 3 && out.contains("OldSpecUnknown"), "without a history it is held: {code} {out} {err}");
    assert!(is_alive(first));
    std::fs::rename(fleet.path("history"), m.join(".git")).expect("a folder");
    commit(&m, "another pid file");
    forget();
    fleet.well("with one it is replaced", &[]);
    assert_eq!(fleet.effects(), ["start a 1", "stop a", "start a 1"]);
    assert!(!is_alive(first) && fleet.pid("a").is_some_and(is_alive));
    // A controller that stands on such a disk knows it, too.
    a.pid_file = "third";
    fleet.write(&a);
    commit(&m, "a third pid file");
    forget();
    let args =
        ["watch", "m", "--owner", "team", "--target", "it", "--interval", "1s", "--listen", "127.0.0.1:0"];
    let log = std::fs::File::create(fleet.path("watch.log")).expect("a file");
    let mut watch = command(&args, fleet.system.folder.path());
    watch.env("IT_SECRET", "s3cret").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let _watch = KillOnDrop(watch.spawn().expect("it starts"));
    until("it is replaced", || fleet.effects().len() == 5);
    assert_eq!(fleet.effects()[3..], ["stop a", "start a 1"]);
}
