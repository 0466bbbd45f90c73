//! `watch --git` on real repositories: commits are applied, rewinds and unsigned commits are refused, and no
//! content of a repository is run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use abide::manifest::Limits;
use abide::source::Source;
use abide::source::git::{FetchLimits, Git, GitConfig, Signatures};
use abide::store::Embedded;
use serde_json::Value;

use crate::apply::Machine;
use crate::fixtures::machine::start_logged;
pub use crate::fixtures::repository::{Repo, run};
use crate::support::{needs, until};
use crate::system::{is_alive, kill};

/// The right to push tags is not the right to push to a branch of the same name.
#[test]
fn a_tag_is_not_used_in_place_of_a_branch() {
    let repo = Repo::new();
    repo.machine.process("a", "1", "");
    let branch = repo.commit("the branch");
    repo.machine.process("a", "2", "");
    repo.git(&["commit", "--quiet", "--all", "-m", "the tag"]);
    repo.git(&["push", "--quiet", "origin", "HEAD:refs/tags/main"]);
    repo.git(&["push", "--quiet", "origin", "HEAD:refs/tags/v2"]);
    let first = repo.watch("first", &["--ref", "main"]);
    repo.wait_for_log("first", &format!("at commit {}", &branch[..12]));
    until("it runs", || repo.machine.effects() == ["start a 1"]);
    let status = repo.machine.run(&["status"]).1;
    assert!(status.contains(&format!("commit {}", &branch[..12])), "{status}");
    drop(first);
    // A tag by a name that only it has is what it is.
    let _second = repo.watch("second", &["--ref", "v2"]);
    until("it is taken", || repo.machine.effects().contains(&"start a 2".to_owned()));
}

/// A link to a folder outside of the source does not delete the processes that were declared there.
#[test]
fn a_path_replaced_by_an_out_of_tree_link_is_reported_and_not_pruned() {
    let repo = Repo::new();
    let folder = repo.machine.path("m");
    std::fs::create_dir_all(folder.join("p/team")).expect("a folder");
    for name in ["a", "b"] {
        repo.machine.process(name, "1", "");
    }
    std::fs::rename(folder.join("a.yaml"), folder.join("p/a.yaml")).expect("a file");
    std::fs::rename(folder.join("b.yaml"), folder.join("p/team/b.yaml")).expect("a file");
    std::fs::write(folder.join("notes"), "of people").expect("a file");
    repo.commit("both");
    let _watch = repo.watch("watch.log", &["--path", "p", "--prune"]);
    until("both run", || repo.runs(&["a", "b"]));
    std::fs::rename(folder.join("p/team"), folder.join("team")).expect("a folder");
    std::os::unix::fs::symlink("../team", folder.join("p/team")).expect("a link");
    std::os::unix::fs::symlink("../notes", folder.join("p/notes")).expect("a link");
    std::os::unix::fs::symlink("nowhere", folder.join("p/lost")).expect("a link");
    repo.commit("behind a link");
    repo.wait_for_log("watch.log", "p/team:1:1: the link points outside of the tree");
    assert!(repo.runs(&["a", "b"]) && !repo.read_log("watch.log").contains("stop "));
    assert!(
        !repo.read_log("watch.log").contains("p/notes") && !repo.read_log("watch.log").contains("p/lost")
    );
}

#[test]
fn each_commit_is_applied_and_recorded() {
    let repo = Repo::new();
    let machine = &repo.machine;
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let first = repo.commit("both");
    let mut watch = repo.watch("watch.log", &["--prune"]);
    until("both run", || repo.runs(&["a", "b"]));
    repo.wait_for_log("watch.log", &format!("at commit {}", &first[..12]));
    let before = machine.pids();
    // A change, and its revert: what was is again.
    machine.process("a", "2", "");
    let second = repo.commit("another a");
    until("a is another", || machine.pids().get("a").is_some_and(|pid| *pid != before["a"]));
    repo.git(&["revert", "--no-edit", "HEAD"]);
    repo.push(&[]);
    until("a is as it was", || machine.effects().iter().filter(|line| *line == "start a 1").count() == 2);
    assert_eq!(machine.pids()["b"], before["b"]);
    until("it is written down", || {
        let entries: Vec<Value> =
            serde_json::from_str(&machine.run(&["history", "-o", "json"]).1).expect("entries");
        entries.iter().any(|entry| entry["commit"] == second.as_str())
    });
    assert!(machine.run(&["history"]).1.contains(&second[..12]));
    // One broken file: the error has its location in the repository; the others are applied, and nothing is pruned.
    let good = machine.manifest_text("a");
    machine.edit("a", "start_cmd", "strat_cmd");
    std::fs::remove_file(machine.path("m/b.yaml")).expect("a file");
    machine.process("c", "1", "");
    let calm = machine.pids();
    repo.commit("broken");
    until("the others go on", || repo.runs(&["c"]));
    assert!(repo.read_log("watch.log").contains("a.yaml:10:5"), "{}", repo.read_log("watch.log"));
    assert_eq!((machine.pids()["a"], machine.pids()["b"]), (calm["a"], calm["b"]));
    // One that is started now knows how the broken file was.
    watch.0.kill().expect("it is killed");
    watch.0.wait().expect("it ends");
    let _again = repo.watch("again", &["--prune"]);
    repo.wait_for_log("again", "read 2 instances, revision");
    // Whole again: what no file declares any more goes at once.
    std::fs::write(machine.path("m/a.yaml"), &good).expect("a file");
    repo.commit("whole");
    until("b is gone", || !machine.rows().contains_key("b"));
    assert_eq!(machine.pids()["a"], calm["a"]);
    // An empty commit deletes nothing.
    repo.git(&["rm", "--quiet", "-r", "."]);
    std::fs::create_dir_all(machine.path("m")).expect("a folder");
    repo.commit("nothing");
    repo.wait_for_log("again", "Empty");
    assert!(repo.runs(&["a", "c"]));
}

#[test]
fn a_rewound_branch_is_refused_also_after_a_crash() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    let first = repo.commit("first");
    machine.process("a", "2", "");
    let second = repo.commit("second");
    let mut watch = repo.watch("watch.log", &[]);
    until("a runs", || repo.runs(&["a"]));
    repo.wait_for_log("watch.log", "converged");
    let before = machine.pids();
    // A force push resets the branch while it is watched.
    repo.git(&["reset", "--quiet", "--hard", &first]);
    repo.push(&["--force"]);
    repo.wait_for_log("watch.log", "Rewound");
    let said = repo.read_log("watch.log");
    assert!(said.contains(&first) && said.contains(&second), "{said}");
    assert!(said.contains(&format!("--accept-rewind {first}")), "{said}");
    // Killed, and started again: the watch keeps the last commit, repeats nothing, and reports the rewind again.
    watch.0.kill().expect("it is killed");
    watch.0.wait().expect("it ends");
    let mut again = repo.watch("again", &[]);
    repo.wait_for_log("again", "Rewound");
    repo.wait_for_log("again", &format!("at commit {}", &second[..12]));
    repo.wait_for_log("again", "converged");
    assert_eq!((machine.pids(), machine.effects()), (before.clone(), vec!["start a 2".to_owned()]));
    // Forward again: over.
    repo.git(&["reset", "--quiet", "--hard", &second]);
    repo.push(&["--force"]);
    repo.wait_for_log("again", "source: recovered");
    again.0.kill().expect("it is killed");
    again.0.wait().expect("it ends");
    // Rewound while no watch runs.
    repo.git(&["reset", "--quiet", "--hard", &first]);
    machine.process("b", "1", "");
    let other = repo.commit_forced("other");
    let mut third = repo.watch("third", &[]);
    repo.wait_for_log("third", "Rewound");
    repo.wait_for_log("third", "converged");
    assert_eq!((machine.pids(), machine.effects()), (before, vec!["start a 2".to_owned()]));
    third.0.kill().expect("it is killed");
    third.0.wait().expect("it ends");
    // By name it is taken.
    let _last = repo.watch("last", &["--accept-rewind", &other]);
    until("the other is taken", || {
        machine.effects().contains(&"start b 1".to_owned()) && repo.runs(&["a", "b"])
    });
    assert!(!repo.read_log("last").contains("Rewound"));
}

#[test]
fn a_repository_that_cannot_be_reached_changes_nothing() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    let mut watch = repo.watch("watch.log", &["--prune"]);
    until("a runs", || repo.runs(&["a"]));
    let before = machine.pids();
    std::fs::rename(machine.path("origin.git"), machine.path("away")).expect("a folder");
    repo.wait_for_log("watch.log", "cannot fetch HEAD");
    // Drift is repaired all the same, also by one that was started meanwhile.
    watch.0.kill().expect("it is killed");
    watch.0.wait().expect("it ends");
    let _again = repo.watch("again", &["--prune"]);
    repo.wait_for_log("again", "cannot fetch HEAD");
    repo.wait_for_log("again", "converged: 1 instance");
    assert_eq!(machine.pids(), before);
    std::fs::rename(machine.path("away"), machine.path("origin.git")).expect("a folder");
    repo.wait_for_log("again", "source: recovered");
    machine.process("b", "1", "");
    repo.commit("second");
    until("b runs", || repo.runs(&["b"]));
    assert_eq!(machine.pids()["a"], before["a"]);
    assert_eq!(repo.read_log("again").matches("cannot fetch").count(), 1, "{}", repo.read_log("again"));
}

#[test]
fn only_commits_of_allowed_signers_are_applied() {
    if !needs("ssh-keygen") {
        return;
    }
    let repo = Repo::new();
    let machine = &repo.machine;
    let key = |name: &str| {
        let file = machine.path(name);
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"])
            .arg(&file)
            .stdin(Stdio::null())
            .status()
            .expect("ssh-keygen runs");
        assert!(made.success());
        let public = std::fs::read_to_string(machine.path(&format!("{name}.pub"))).expect("a key");
        (format!("user.signingKey={}", file.display()), public)
    };
    let ((ann, public), (eve, _)) = (key("ann"), key("eve"));
    std::fs::write(machine.path("signers"), format!("ann@example.org {public}")).expect("a file");
    let signed = |message: &str, key: &str| {
        repo.commit_with(message, &["-c", "gpg.format=ssh", "-c", key, "-c", "commit.gpgSign=true"])
    };
    machine.process("a", "1", "");
    let unsigned = repo.commit("unsigned");
    let _watch = repo.watch("watch.log", &["--verify-signatures", "signers"]);
    repo.wait_for_log("watch.log", &format!("commit {unsigned} is refused: not signed"));
    machine.process("a", "2", "");
    let stranger = signed("by a stranger", &eve);
    repo.wait_for_log("watch.log", &format!("commit {stranger} is refused: invalid signature"));
    assert!(machine.effects().is_empty() && machine.rows().is_empty());
    machine.process("a", "3", "");
    signed("by ann", &ann);
    until("a runs", || repo.runs(&["a"]));
    machine.process("a", "4", "");
    let unsigned = repo.commit("unsigned again");
    repo.wait_for_log("watch.log", &format!("commit {unsigned} is refused"));
    machine.process("a", "5", "");
    signed("by ann again", &ann);
    until("the fifth runs", || machine.effects().contains(&"start a 5".to_owned()));
    let starts: Vec<String> =
        machine.effects().into_iter().filter(|line| line.starts_with("start")).collect();
    assert_eq!(starts, ["start a 3", "start a 5"]);
}

#[test]
fn gpg_uses_only_the_keys_of_the_file() {
    if !needs("gpg") {
        return;
    }
    let repo = Repo::new();
    let machine = &repo.machine;
    // Ann's keys are in the user's own home; the file names Bob alone.
    let home = machine.path(".gnupg");
    std::fs::create_dir(&home).expect("a folder");
    std::fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("a mode");
    let gpg = |args: &[&str]| {
        let output =
            Command::new("gpg").args(["--batch", "--quiet"]).args(args).env("GNUPGHOME", &home).output();
        let output = output.expect("gpg runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    for who in ["ann@example.org", "bob@example.org"] {
        gpg(&["--passphrase", "", "--quick-generate-key", who, "ed25519", "sign", "never"]);
    }
    std::fs::write(machine.path("keys"), gpg(&["--export", "bob@example.org"])).expect("a file");
    let wrapper = machine.path("gpg-here");
    std::fs::write(&wrapper, format!("#!/bin/sh\nGNUPGHOME={} exec gpg \"$@\"\n", home.display()))
        .expect("a file");
    std::fs::set_permissions(&wrapper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    let (program, sign) = (format!("gpg.program={}", wrapper.display()), "commit.gpgSign=true");
    let signed = |message: &str, who: &str| {
        let key = format!("user.signingKey={who}");
        repo.commit_with(message, &["-c", &program, "-c", sign, "-c", &key])
    };
    machine.process("a", "1", "");
    let ann = signed("by ann", "ann@example.org");
    let _watch = repo.watch("watch.log", &["--verify-signatures", "keys"]);
    repo.wait_for_log("watch.log", &format!("commit {ann} is refused: invalid signature"));
    assert!(machine.effects().is_empty());
    signed("by bob", "bob@example.org");
    until("a runs", || repo.runs(&["a"]));
    let _ = Command::new("gpgconf").args(["--kill", "all"]).env("GNUPGHOME", &home).status();
}

#[test]
fn a_path_in_a_branch_is_loaded_like_a_directory() {
    let repo = Repo::new();
    let machine = &repo.machine;
    std::fs::create_dir_all(machine.path("m/fleet/.data")).expect("a folder");
    for name in ["a", "b", "outside"] {
        machine.process(name, "1", "");
    }
    std::fs::rename(machine.path("m/a.yaml"), machine.path("m/fleet/a.yaml")).expect("a file");
    std::fs::rename(machine.path("m/b.yaml"), machine.path("m/fleet/.data/b.yaml")).expect("a file");
    std::os::unix::fs::symlink(".data/b.yaml", machine.path("m/fleet/b.yaml")).expect("a link");
    std::fs::write(machine.path("m/fleet/notes.txt"), "no manifest").expect("a file");
    repo.git(&["checkout", "--quiet", "-b", "prod"]);
    repo.commit("first");
    repo.git(&["push", "--quiet", "origin", "HEAD:prod"]);
    let _watch = repo.watch("watch.log", &["--ref", "prod", "--path", "./fleet/"]);
    until("both run", || repo.runs(&["a", "b"]));
    repo.wait_for_log("watch.log", "converged: 2 instances");
    // A link out of it is a problem with its place, and spoils nothing.
    std::os::unix::fs::symlink("/etc/hostname", machine.path("m/fleet/z.yaml")).expect("a link");
    repo.commit("a link");
    repo.git(&["push", "--quiet", "origin", "HEAD:prod"]);
    repo.wait_for_log("watch.log", "fleet/z.yaml:1:1");
    assert!(repo.read_log("watch.log").contains("points outside of the tree"));
    assert!(!machine.rows().contains_key("outside"));
    assert!(!machine.path(".abide-home/git").join("fleet").exists());
}

#[test]
fn option_like_and_command_like_urls_are_refused() {
    let machine = Machine::new();
    let touched = machine.path("touched");
    let ext = format!("--git=ext::sh -c touch% {}", touched.display());
    std::fs::write(machine.path("nokeys"), "hello").expect("a file");
    for (args, what) in [
        (&["--git=-x"][..], "begins with a dash"),
        (&["--git=--upload-pack=x"], "begins with a dash"),
        (&["--git=/r", "--ref=-x"], "begins with a dash"),
        (&["--git=/r", "--path=-x"], "begins with a dash"),
        (&["--git=/r", "--path=../x"], "is outside of the repository"),
        (&["--git=/r", "--ref=a:b"], "is not a valid branch or tag name"),
        (&[ext.as_str()], "names a program to run"),
        (&["--git=fd::3"], "names a program to run"),
        (&["--git=https://u:secret@h/x", "--ref=-x"], "begins with a dash"),
        (&["--git=/r", "--verify-signatures=nokeys"], "neither allowed signers"),
        (&["--git=/r", "--verify-signatures=none"], "no such file"),
        (&["--git=/r", "--accept-rewind=zz"], "not a commit id"),
        (&["--git=http://u:secret@h.example/x"], "refusing plain http to h.example (not a loopback address)"),
        (&["--git=git://h.example/x"], "pass --insecure-git"),
        (&["--git=http://h.example/x", "--insecure-git", "--ref=-x"], "begins with a dash"),
        (&["m", "--insecure-git"], "--git"),
        (&["--git=/r", "m"], "cannot be used with"),
        (&["m", "--ref=main"], "--git"),
        (&[], "required"),
    ] {
        let mut all = vec!["watch"];
        all.extend(args);
        let (code, _, err) = machine.run(&all);
        assert!(code == 64 && err.contains(what) && !err.contains("secret"), "{args:?}: {code} {err}");
    }
    assert!(!touched.exists() && !machine.path(".abide-home").exists());
}

#[test]
fn no_hook_or_configured_command_is_run() {
    let repo = Repo::new();
    let machine = &repo.machine;
    let touched = machine.path("touched");
    let script = format!("#!/bin/sh\necho $0 >> {}\n", touched.display());
    let program = |path: &Path| {
        std::fs::write(path, &script).expect("a file");
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    };
    machine.process("a", "1", "");
    repo.commit("first");
    for folder in ["hooks", "origin.git/hooks"] {
        std::fs::create_dir_all(machine.path(folder)).expect("a folder");
        for hook in ["post-checkout", "post-merge", "reference-transaction", "pre-auto-gc", "post-rewrite"] {
            program(&machine.path(folder).join(hook));
        }
    }
    program(&machine.path("askpass"));
    // The user's own configuration, gone wrong.
    let config = format!(
        "[core]\n\thooksPath = {0}/hooks\n\tfsmonitor = {0}/askpass\n\taskPass = {0}/askpass\n[protocol \"ext\"]\n\tallow = always\n",
        machine.path("").display()
    );
    std::fs::write(machine.path(".gitconfig"), config).expect("a file");
    let _watch = repo.watch("watch.log", &[]);
    until("a runs", || repo.runs(&["a"]));
    machine.process("b", "1", "");
    repo.commit_quietly("second");
    until("b runs", || repo.runs(&["b"]));
    assert!(!touched.exists(), "{}", std::fs::read_to_string(&touched).unwrap_or_default());
}

/// A program that never ends in place of the other side's.
#[test]
fn a_slow_fetch_times_out_and_does_not_block_shutdown() {
    let machine = Machine::new();
    let (ssh, pid) = (machine.path("ssh"), machine.path("pid"));
    std::fs::write(&ssh, format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", pid.display()))
        .expect("a file");
    std::fs::set_permissions(&ssh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    let watch = |log: &str, patience: &str| {
        let args =
            ["watch", "--git", "ssh://git:secret@h/x", "--git-timeout", patience, "--listen", "127.0.0.1:0"];
        let mut command = machine.command(&args);
        command.env("GIT_SSH_COMMAND", &ssh).env("HOME", machine.path("."));
        start_logged(&mut command, &machine.path(log))
    };
    let asked = || std::fs::read_to_string(&pid).ok()?.trim().parse::<u32>().ok();
    let first = watch("first", "1s");
    let said = || std::fs::read_to_string(machine.path("first")).unwrap_or_default();
    until("it is logged", || said().contains("git took longer than 1s"));
    assert!(said().contains("ssh://***@h/x") && !said().contains("secret"), "{}", said());
    let other = asked().expect("it ran");
    until("it was ended", || !is_alive(other));
    drop(first);
    std::fs::remove_file(&pid).expect("it was there");
    let mut second = watch("second", "5m");
    until("it asks", || asked().is_some_and(is_alive));
    let other = asked().expect("it ran");
    kill(second.0.id(), "TERM");
    let begin = std::time::Instant::now();
    assert!(second.0.wait().expect("it ends").code().is_some() && begin.elapsed() < Duration::from_secs(20));
    until("the other was ended", || !is_alive(other));
}

/// A webhook causes a fetch at once, not at the next interval.
#[test]
fn a_webhook_triggers_a_fetch() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    let setting = GitConfig {
        url: machine.path("origin.git").display().to_string(),
        reference: "main".to_owned(),
        path: PathBuf::new(),
        signers: None,
        signatures: Signatures::Tip,
        accept_rewind: None,
        insecure: false,
        interval: Duration::from_secs(3600),
        fetch: FetchLimits { timeout: Duration::from_secs(60), max_pack: 1 << 30 },
        folder: machine.path("git"),
        owner: "default".to_owned(),
        limits: Limits::default(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let store = Embedded::open(&machine.path("store.db")).expect("a store");
        let mut git =
            Source::Git(Box::new(Git::new(setting.validated().expect("it is well"), Box::new(|_| {}))));
        assert!(git.read(&store).await.expect("it reads").is_none());
        until("the first is there", || git.changed());
        machine.process("b", "1", "");
        let second = repo.commit("second");
        let nudge = git.trigger();
        std::thread::spawn(move || nudge.now());
        git.wait_for_signal().await;
        until("the second is there", || git.changed());
        let reading = git.read(&store).await.expect("it reads").expect("a reading");
        assert_eq!((reading.commit.as_deref(), reading.may_prune), (Some(second.as_str()), true));
        // A directory's too.
        let mut directory = Source::new(
            vec![machine.path("m")],
            Limits::default(),
            Duration::from_secs(3600),
            Box::new(|_| {}),
        );
        directory.trigger().now();
        assert!(directory.changed() && !directory.changed());
    });
}

#[test]
fn two_watches_share_fetched_objects() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    repo.git(&["push", "--quiet", "origin", "HEAD:other"]);
    let _first = repo.watch("first", &[]);
    let _second = repo.watch("second", &["--ref", "other", "--owner", "others"]);
    until("a runs", || repo.runs(&["a"]));
    repo.wait_for_log("second", "read 1 instance");
    // Neither is disturbed by the other.
    machine.process("b", "1", "");
    repo.commit("second");
    repo.git(&["push", "--quiet", "origin", "HEAD:other"]);
    until("b runs", || repo.runs(&["b"]));
    repo.wait_for_log("second", "read 2 instances");
    for log in ["first", "second"] {
        assert!(!repo.read_log(log).contains("source"), "{}", repo.read_log(log));
    }
    let mirrors = std::fs::read_dir(machine.path(".abide-home/git")).expect("mirrors").flatten();
    assert_eq!(mirrors.filter(|entry| entry.path().is_dir()).count(), 1);
}
