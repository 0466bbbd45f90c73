//! Folders and files that the gateway and the agent trust: refused where another user can change them, warned of where
//! another user can read them, private where Abide makes them.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Stdio;

use crate::apply::KillOnDrop;
use crate::support::{Tree, command, test_user, until};
use crate::system::{APPS, System};

fn set(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("a mode");
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("it is there").mode() & 0o777
}

/// Exit code and messages of a service that refuses to start. One that starts is ended, and fails the test.
fn ended(args: &[&str], here: &Path) -> (Option<i32>, String) {
    let log = here.join("service.log");
    let file = std::fs::File::create(&log).expect("a file");
    let mut command = command(args, here);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let mut service = KillOnDrop(command.spawn().expect("it starts"));
    let mut code = None;
    until(&format!("{args:?} is refused"), || {
        code = service.0.try_wait().expect("a child");
        code.is_some()
    });
    (code.and_then(|code| code.code()), std::fs::read_to_string(log).expect("a file"))
}

#[test]
fn files_that_another_user_can_change_are_refused_with_the_command_that_corrects_them() {
    let Some(user) = test_user() else { return };
    let tree = Tree::new(&[("apps.yaml", APPS), ("tokens", "* token\n"), ("token", "token\n")]);
    let here = tree.path();
    std::fs::create_dir(here.join("data")).expect("a folder");
    let serve = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data",
        "data",
        "--apps",
        "apps.yaml",
        "--agent-token-file",
        "tokens",
    ];
    let agent = ["agent", "--join", "http://127.0.0.1:9", "--token-file", "token", "--data", "data"];
    let up = ["up", "--listen", "127.0.0.1:0"];
    std::fs::create_dir(here.join(".abide-home")).expect("a folder");
    let all: [(&[&str], &str); 6] = [
        (&serve, "data"),
        (&agent, "data"),
        (&serve, "apps.yaml"),
        (&serve, "tokens"),
        (&agent, "token"),
        (&up, ".abide-home"),
    ];
    for (args, name) in all {
        let path = here.join(name);
        let good = mode(&path) & 0o755;
        for (owner, bits, says) in [
            (0, 0o002, "is writable by every user: run `chmod go-w "),
            (
                user.uid,
                0,
                "belongs to user abide-test, not to root: check its content, then run `chown root ",
            ),
        ] {
            chown(&path, Some(owner), None).expect("an owner");
            set(&path, good | bits);
            let (code, err) = ended(args, here);
            assert!(code == Some(1) && err.contains(name), "{args:?} {name}: {err}");
            assert!(err.contains(says), "{args:?} {name}: {err}");
        }
        chown(&path, Some(0), None).expect("an owner");
        set(&path, good);
    }
    // A group with another member is other users; a private group is not.
    set(&here.join("data"), 0o770);
    chown(here.join("data"), Some(0), Some(user.gid)).expect("a group");
    let (_, err) = ended(&serve, here);
    assert!(err.contains("is writable by group abide-test: run `chmod g-w"), "{err}");
}

#[test]
fn a_file_that_every_user_can_read_is_warned_of_and_new_ones_are_private() {
    let mut system = System::new();
    system.kill_agent();
    set(&system.path("token"), 0o644);
    system.start_agent();
    assert!(
        system.log().contains("token is readable by every user: run `chmod 600 token`"),
        "{}",
        system.log()
    );
    assert_eq!((mode(&system.path("agent")), mode(&system.path("agent/agent.db"))), (0o700, 0o600));
    let before = system.log().len();
    system.kill_agent();
    set(&system.path("token"), 0o600);
    system.start_agent();
    assert!(!system.log()[before..].contains("readable"), "{}", system.log());
}

#[test]
fn a_token_file_that_becomes_writable_is_not_read_again() {
    let mut system = System::new();
    set(&system.path("token"), 0o666);
    // A new session reads the token again.
    system.server = crate::server::Server::at(system.server.address);
    until("it is refused", || system.log().contains("token is writable by every user"));
}

#[test]
fn doctor_names_what_would_be_refused() {
    let tree = Tree::new(&[("x", "")]);
    let home = tree.path().join(".abide-home");
    std::fs::create_dir(&home).expect("a folder");
    for (bits, code, says) in
        [(0o700, 0, "only this user can enter"), (0o755, 0, "chmod 700"), (0o777, 1, "chmod go-w")]
    {
        set(&home, bits);
        let output = command(&["doctor"], tree.path()).stdin(Stdio::null()).output().expect("it runs");
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.code() == Some(code) && out.contains(says), "{bits:o}: {out}");
    }
}

/// The owner of a folder above can replace a file, and an access control list adds users to its mode.
#[test]
fn a_file_below_the_folder_of_another_user_or_with_a_foreign_list_entry_is_refused() {
    let Some(user) = test_user() else { return };
    let tree = Tree::new(&[("inner/token", "token\n"), ("token", "token\n")]);
    let here = tree.path();
    std::fs::create_dir(here.join("data")).expect("a folder");
    ["data", "inner", "inner/token", "token"].iter().for_each(|name| set(&here.join(name), 0o700));
    let agent = |token: &str| {
        let args = ["agent", "--join", "http://127.0.0.1:9", "--token-file", token, "--data", "data"];
        ended(&args, here)
    };
    chown(here.join("inner"), Some(user.uid), Some(user.gid)).expect("a folder of the user");
    let (code, log) = agent("inner/token");
    assert!(
        code == Some(1) && log.contains(&format!("inner belongs to user {}", user.name)),
        "{code:?} {log}"
    );
    // Version 2; owner, named user, group, mask, others.
    let entry = |tag: u16, rights: u16, id: u32| {
        [tag.to_le_bytes().to_vec(), rights.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat()
    };
    let none = u32::MAX;
    let entries = [
        entry(1, 6, none),
        entry(2, 6, user.uid),
        entry(4, 0, none),
        entry(0x10, 6, none),
        entry(0x20, 0, none),
    ];
    let list = [2u32.to_le_bytes().to_vec(), entries.concat()].concat();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(here.join("token"), "system.posix_acl_access", &list, flags).expect("a list");
    let (code, log) = agent("token");
    let expected = format!("token is writable by user {} (access control list)", user.name);
    assert!(code == Some(1) && log.contains(&expected), "{code:?} {log}");
}
