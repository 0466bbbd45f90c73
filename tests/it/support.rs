//! What tests share: trees of manifests in temporary folders, and the real program.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use abide::manifest::{self, Limits, Loaded};

/// A folder of files that is gone with the test.
pub struct Tree(pub tempfile::TempDir);

impl Tree {
    pub fn new<B: AsRef<[u8]>>(files: &[(&str, B)]) -> Tree {
        let tree = Tree(tempfile::tempdir().expect("a temporary folder"));
        for (name, content) in files {
            tree.write(name, content.as_ref());
        }
        tree
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, content).expect("a file");
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn load(&self) -> Loaded {
        manifest::load(&[self.path().to_path_buf()], &Limits::default())
    }

    /// Problems as `file:line:column code message | hint`, files without the folder.
    pub fn problems(&self) -> Vec<String> {
        let prefix = format!("{}/", self.path().display());
        let text = |text: &str| text.replace(&prefix, "");
        let problems = self.load().problems;
        problems
            .iter()
            .map(|p| {
                let hint = p.hint.as_deref().map(|hint| format!(" | {hint}")).unwrap_or_default();
                let place = format!("{}:{}:{}", text(&p.file), p.line, p.column);
                format!("{place} {} {}{}", p.code.text(), text(&p.message), text(&hint))
            })
            .collect()
    }
}

/// Runs the program, in a folder, with nothing of the caller's environment that it listens to.
pub fn abide(args: &[&str], here: &Path, stdin: &[u8]) -> Output {
    let mut child = command(args, here)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A program that does not read its input is fine.
    let _ = std::io::Write::write_all(&mut child.stdin.take().expect("a pipe"), stdin);
    child.wait_with_output().expect("the program ends")
}

/// The program under test. `ABIDE_TEST_PROGRAM=/path/to/abide` names another version, and its gateway takes the place of
/// those in this process: a test of an attack has to fail there if that version has the hole.
pub fn program() -> std::path::PathBuf {
    other_program().unwrap_or_else(|| env!("CARGO_BIN_EXE_abide").into())
}

pub fn other_program() -> Option<std::path::PathBuf> {
    std::env::var_os("ABIDE_TEST_PROGRAM").map(Into::into)
}

pub fn command(args: &[&str], here: &Path) -> Command {
    let mut command = Command::new(program());
    // A local system of its own, should one be started.
    command.args(args).current_dir(here).env("ABIDE_HOME", here.join(".abide-home"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ABIDE_") && name != "ABIDE_HOME" {
            command.env_remove(name);
        }
    }
    // A config file that a test wrote is named, as in a pipeline: one that is merely found is not trusted.
    if here.join("abide.yaml").is_file() {
        command.env("ABIDE_CONFIG", "abide.yaml");
    }
    command
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A good process, a line a section, so that a test can change one line.
pub const GOOD: &str = "\
apiVersion: abide/v1
kind: Process
meta: {namespace: web, name: api}
hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]
spec:
  identity: {proc_name: api, setup_path: /opt/api, pid_path: /run/api.pid, user: app}
  control: {start_cmd: ./api}
  monitor_policy: {auto_type: 1}
";

/// [`GOOD`] with one line exchanged. The line must be there: a test that changes nothing claims nothing.
pub fn with(old: &str, new: &str) -> String {
    assert!(GOOD.contains(old), "{old}");
    GOOD.replace(old, new)
}

/// Waits for something that must come.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < std::time::Duration::from_secs(30), "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// An unprivileged user for tests with a second uid; `tests/run` creates it.
pub struct TestUser {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

impl TestUser {
    /// A command that runs with this user's uid and gid, and without supplementary groups.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(program);
        command.uid(self.uid).gid(self.gid);
        command
    }
}

/// The test user, if these tests run as root and it exists; otherwise the calling test is skipped.
pub fn test_user() -> Option<TestUser> {
    const NAME: &str = "abide-test";
    if !needs_root() {
        return None;
    }
    match nix::unistd::User::from_name(NAME).expect("the user database can be read") {
        Some(user) => Some(TestUser { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw() }),
        None => {
            skip(&format!("the user {NAME} does not exist (tests/run creates it)"));
            None
        }
    }
}

/// Whether a program is on PATH; if not, the calling test is skipped: `if !needs("nginx") { return; }`.
pub fn needs(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !found {
        skip(&format!("{program} is not installed (tests/run installs it)"));
    }
    found
}

/// Whether these tests run as root; if not, the calling test is skipped.
pub fn needs_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skip("not root");
    }
    root
}

/// Prints that the calling test is skipped, past the capture of test output. With `ABIDE_TEST_ALL=1` the test fails.
pub fn skip(reason: &str) {
    use std::io::Write;
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    if std::env::var_os("ABIDE_TEST_ALL").is_some_and(|value| value == "1") {
        panic!("skipped, and ABIDE_TEST_ALL=1 forbids that: {test}: {reason}");
    }
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
}
