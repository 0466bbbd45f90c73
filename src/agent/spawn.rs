//! Launching: a process of its own session, as its user, in its folder, with its environment and none of ours.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::birth::{Birth, Stage};
use super::exit_record::{kill_group, recording};
use super::kernel::Hold;
use super::reaper;
use crate::model::{EnvValue, Spec};

/// Whom a process runs as.
#[derive(Clone, Debug)]
pub struct Account {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    name: String,
    home: PathBuf,
    shell: PathBuf,
}

impl Account {
    /// Whom a spec's commands run as.
    pub fn of(spec: &Spec) -> Result<Account, String> {
        match &spec.identity.user {
            Some(name) => Account::named(name),
            None => {
                let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten();
                Account::named(&me.ok_or("this agent's own user has no name")?.name)
            }
        }
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn named(name: &str) -> Result<Account, String> {
        use nix::unistd::{User, getgrouplist};
        let user = User::from_name(name).map_err(|error| format!("cannot look user {name:?} up: {error}"))?;
        let user = user.ok_or_else(|| format!("there is no user {name:?} on this host"))?;
        let c_name = std::ffi::CString::new(name).map_err(|_| format!("{name:?} is no user's name"))?;
        let groups = getgrouplist(&c_name, user.gid)
            .map_err(|error| format!("cannot look the groups of {name:?} up: {error}"))?;
        let me = nix::unistd::geteuid();
        if !me.is_root() && user.uid != me {
            return Err(format!("only root can run a process as {name:?}, and this agent is not root"));
        }
        Ok(Account {
            uid: user.uid.as_raw(),
            gid: user.gid.as_raw(),
            groups: groups.iter().map(|group| group.as_raw()).collect(),
            name: user.name,
            home: user.dir,
            shell: user.shell,
        })
    }
}

/// The environment of a process: a plain one, what its spec says, and who it is.
pub fn environment(
    spec: &Spec,
    account: &Account,
    marks: &[(&str, String)],
) -> Result<Vec<(String, String)>, String> {
    let mut env: Vec<(String, String)> = vec![
        ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("HOME".to_owned(), account.home.display().to_string()),
        ("SHELL".to_owned(), account.shell.display().to_string()),
        ("USER".to_owned(), account.name.clone()),
        ("LOGNAME".to_owned(), account.name.clone()),
    ];
    for (name, value) in &spec.env {
        let value = match value {
            EnvValue::Text(text) => text.clone(),
            EnvValue::Secret(secret) => secret.expose().to_owned(),
            EnvValue::Digest(_) => return Err(format!("env {name}: the secret's value is not known here")),
            EnvValue::File(file) => std::fs::read_to_string(file)
                .map(|text| text.trim_end_matches('\n').to_owned())
                .map_err(|error| format!("env {name}: cannot read {file}: {error}"))?,
        };
        env.push((name.clone(), value));
    }
    env.extend(marks.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    Ok(env)
}

/// One launch, ready to go.
pub struct Launch<'a> {
    pub command: &'a str,
    pub folder: &'a Path,
    pub account: &'a Account,
    pub env: Vec<(String, String)>,
    /// Where its output goes; `None`: nowhere.
    pub output: Option<File>,
    /// Where its exit code is written when it ends.
    pub code: Option<File>,
    /// The door of its control group.
    pub group: Option<File>,
}

impl Launch<'_> {
    /// Begins it, and holds it from its first moment on.
    pub fn go(self) -> Result<Hold, String> {
        let shell =
            |script: String| (vec![c"/bin/sh".to_owned()], vec!["sh".to_owned(), "-c".to_owned(), script]);
        let by_shell = match &self.code {
            None => shell(self.command.to_owned()),
            Some(_) => shell(recording(self.command)),
        };
        let (programs, words) = match plain(self.command).filter(|_| self.code.is_none()) {
            Some(words) => (self.places(&words[0])?, words),
            None => by_shell.clone(),
        };
        match self.begin(programs, &words) {
            // A script that does not say what runs it: a shell does.
            Err((Stage::Program, error)) if error.raw_os_error() == Some(libc::ENOEXEC) => {
                self.begin(by_shell.0, &by_shell.1)
            }
            begun => begun,
        }
        .map_err(|(stage, error)| self.explain(stage, &error))
    }

    /// Where a shell would look for a program.
    fn places(&self, program: &str) -> Result<Vec<CString>, String> {
        if program.contains('/') {
            return Ok(vec![c_text(program)?]);
        }
        let path =
            self.env.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, value)| value.as_str());
        path.split(':').map(|folder| c_text(&format!("{folder}/{program}"))).collect()
    }

    fn begin(&self, programs: Vec<CString>, words: &[String]) -> Result<Hold, (Stage, std::io::Error)> {
        let wrong = |why: String| (Stage::Program, std::io::Error::other(why));
        let texts =
            |texts: &[String]| texts.iter().map(|text| c_text(text)).collect::<Result<_, _>>().map_err(wrong);
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(|error| (Stage::Descriptors, error))?;
        let Account { uid, gid, groups, .. } = self.account;
        let birth = Birth {
            programs,
            args: texts(words)?,
            env: texts(&env)?,
            folder: c_text(&self.folder.display().to_string()).map_err(wrong)?,
            input: null.as_fd(),
            output: self.output.as_ref().unwrap_or(&null).as_fd(),
            code: self.code.as_ref().map(AsFd::as_fd),
            group: self.group.as_ref().map(AsFd::as_fd),
            ids: nix::unistd::geteuid().is_root().then(|| (*uid, *gid, groups.clone())),
        };
        let _born = reaper::birth();
        let (pid, fd) = birth.go()?;
        Hold::child(pid, fd).ok_or_else(|| (Stage::Clone, std::io::Error::other("it cannot be held")))
    }

    fn explain(&self, stage: Stage, error: &std::io::Error) -> String {
        let (command, folder, name) = (self.command, self.folder.display(), &self.account.name);
        match stage {
            Stage::Folder if !self.folder.is_dir() => format!("setup_path {folder} is not there"),
            Stage::Folder => format!("cannot enter setup_path {folder}: {error}"),
            Stage::User => format!("cannot become user {name:?}: {error}"),
            Stage::Clone | Stage::Session | Stage::Descriptors | Stage::Program => {
                format!("cannot run {command:?}: {error}")
            }
        }
    }
}

fn c_text(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} contains a NUL"))
}

/// The words of a command that needs no shell; `None`: it does.
pub fn plain(command: &str) -> Option<Vec<String>> {
    const SYNTAX: &str = "|&;<>()$`\\\"'*?[]#~{}!\n\r";
    #[rustfmt::skip]
    const SHELLS: [&str; 52] = [
        ".", ":", "[", "alias", "bg", "break", "case", "cd", "command", "continue", "do", "done", "echo", "elif",
        "else", "esac", "eval", "exec", "exit", "export", "fg", "fi", "for", "function", "getopts", "hash", "if",
        "in", "jobs", "kill", "local", "printf", "pwd", "read", "readonly", "return", "select", "set", "shift",
        "test", "then", "time", "times", "trap", "type", "ulimit", "umask", "unalias", "unset", "until", "wait",
        "while",
    ];
    if command.chars().any(|c| SYNTAX.contains(c)) {
        return None;
    }
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let first = words.first()?;
    let sets = first.contains('=');
    (!sets && !SHELLS.contains(&first.as_str())).then_some(words)
}

/// Opens a process's log: for appending, made with its folders if need be; below a folder it has its own name.
pub fn log_file(path: &str, name: &str) -> Result<File, String> {
    let mut path = PathBuf::from(path);
    if path.is_dir() {
        path.push(format!("{name}.log"));
    }
    let failed = |error: std::io::Error| format!("cannot write to log_path {}: {error}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    File::options().append(true).create(true).open(&path).map_err(failed)
}

/// Writes a pid file so that a reader sees all of it or none.
pub fn write_pid_file(path: &Path, pid: u32) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot write pid_path {}: {error}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{pid}"));
    let beside = PathBuf::from(beside);
    std::fs::write(&beside, format!("{pid}\n")).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}

/// How a command of a spec ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    Well,
    /// With this code, and this at the end of its output.
    Badly(i32, String),
    /// It took too long and was killed.
    TooLong(String),
}

/// How much of a command's output is kept.
const TAIL: u64 = 4096;

/// A command of a spec, and the time that it may take.
pub struct Program<'a> {
    pub command: &'a str,
    pub folder: &'a Path,
    pub account: &'a Account,
    pub env: Vec<(String, String)>,
    pub time: Duration,
}

/// Runs a command to its end, within a time. Its output goes to memory, not through a pipe: a daemon that it leaves behind
/// may hold that open for ever without anybody waiting for it. `record`: where its end is recorded.
pub async fn run(
    program: Program<'_>,
    record: Option<File>,
    group: Option<File>,
) -> Result<(Ended, Output), String> {
    let Program { command, folder, account, env, time } = program;
    let kept = Output::new()?;
    let output = Some(kept.0.try_clone().map_err(|error| error.to_string())?);
    let recorded = record.is_some();
    let launch = Launch { command, folder, account, env, output, code: record, group };
    let hold = launch.go()?;
    if recorded {
        crate::fail::point("command-begun");
    }
    let code = match tokio::time::timeout(time, hold.ended()).await {
        Ok(code) => code,
        Err(_) => {
            kill_group(&hold);
            hold.ended().await;
            return Ok((Ended::TooLong(kept.tail()), kept));
        }
    };
    match code {
        Some(0) => Ok((Ended::Well, kept)),
        code => Ok((Ended::Badly(code.unwrap_or(-1), kept.tail()), kept)),
    }
}

/// What a command says, in memory that has no name. A daemon that it leaves behind may go on writing there for as long as
/// it lives: what was said is forgotten now and then, so that it takes no memory.
pub struct Output(File);

/// No page is larger on machines that we know.
const PAGE: u64 = 65_536;

impl Output {
    const NAME: &str = "abide-output";

    fn new() -> Result<Output, String> {
        let fd = rustix::fs::memfd_create(Output::NAME, rustix::fs::MemfdFlags::CLOEXEC);
        fd.map(|fd| Output(File::from(fd)))
            .map_err(|error| format!("cannot keep the command's output: {}", std::io::Error::from(error)))
    }

    /// Where a process that is there already writes, if that is such a place.
    pub fn of(pid: u32) -> Option<Output> {
        let path = format!("/proc/{pid}/fd/1");
        let is_ours =
            std::fs::read_link(&path).is_ok_and(|to| to.display().to_string().contains(Output::NAME));
        is_ours.then(|| File::options().write(true).open(&path).ok().map(Output)).flatten()
    }

    pub fn tail(&self) -> String {
        use std::os::unix::fs::FileExt;
        let length = self.0.metadata().map_or(0, |meta| meta.len());
        // Read without moving: whoever writes shares the position.
        let mut bytes = vec![0; length.min(TAIL) as usize];
        let _ = self.0.read_exact_at(&mut bytes, length.saturating_sub(TAIL));
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    pub fn forget(&self) {
        use rustix::fs::{FallocateFlags, fallocate};
        let length = self.0.metadata().map_or(0, |meta| meta.len());
        if length > 0 {
            // The last page too: it is only given back whole.
            let length = length.next_multiple_of(PAGE);
            let _ = fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_is_used_where_one_is_needed() {
        let words = |command: &str| plain(command).map(|words| words.join("|"));
        assert_eq!(words("./run  --port 80").as_deref(), Some("./run|--port|80"));
        assert_eq!(words("python3 -m http.server").as_deref(), Some("python3|-m|http.server"));
        for shell in [
            "A=1 ./run",
            "./run > log",
            "cd /x && ./run",
            "exec ./run",
            "echo hi",
            "./run $HOME",
            "./run 'a b'",
            "",
            "  ",
            "a\nb",
        ] {
            assert_eq!(words(shell), None, "{shell}");
        }
    }
}
