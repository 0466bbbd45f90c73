//! Sandbox of a launch: the restrictions of a spec, as plain data and a mount namespace that new processes enter.
//!
//! Limits, priority, capabilities and privileges are plain data, applied by the new process itself
//! ([`Restrictions`]). Mounts (`private_tmp`, `read_only_paths`, `protect_system`) are set up once per launch, in a mount
//! namespace that `before_start`, `start_cmd` and the process share ([`mounts`]). Later commands enter the namespace of the
//! main process; if that is gone, they get an equal one.
//!
//! A restriction that this host cannot enforce fails the start, and the error names its field.

mod mounts;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::mounts::MountRules;
use super::clone_exec::{ExecStage, Restrictions};
use super::process::ProcessIdentity;
use super::user_files::{FileError, FileWork, Rights, UserFileError};
use crate::model::{
    AutoType, Sandbox, SandboxProblem, Spec, StartMode, ULIMITS, capability_number, ulimit_number,
};

/// Reason why a launch cannot be restricted as its spec demands.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error(transparent)]
    Invalid(#[from] SandboxProblem),
    #[error("{field} cannot be enforced on this host: {source}{}", hint(field, source))]
    Host { field: String, source: io::Error },
    #[error("sandbox.read_only_paths: cannot open {} as user {user:?}: {source}", path.display())]
    Path { path: PathBuf, user: String, source: FileError },
    #[error("sandbox.private_tmp hides {field} {path}: use a directory outside /tmp and /var/tmp")]
    Hidden { field: &'static str, path: String },
    #[error(transparent)]
    Files(#[from] UserFileError),
}

/// The right or the kernel that a restriction needs, for a host that lacks it.
fn hint(field: &str, source: &io::Error) -> &'static str {
    let field = field.strip_prefix("sandbox.").unwrap_or(field);
    let is_old = matches!(source.raw_os_error(), Some(libc::ENOSYS));
    match field {
        "nice" => "; a lower nice value needs CAP_SYS_NICE",
        "oom_score_adj" => "; a lower score needs CAP_SYS_RESOURCE",
        "capabilities" => "; the bounding set needs CAP_SETPCAP",
        "no_new_privs" => "",
        field if field.starts_with("ulimits.") => "; a higher hard limit needs CAP_SYS_RESOURCE",
        _ if is_old => "; mounts need Linux 5.12 or newer",
        _ => "; mounts need an agent that runs as root, with CAP_SYS_ADMIN",
    }
}

impl SandboxError {
    /// The error of a restriction that a new process could not apply; `None`: the stage belongs to no restriction.
    pub fn of_stage(
        stage: ExecStage,
        sandbox: &LaunchSandbox,
        source: io::Error,
    ) -> Result<SandboxError, io::Error> {
        let field = match stage {
            ExecStage::MountNamespace => sandbox.mount_fields.clone(),
            ExecStage::Ulimit(resource) => {
                let name = ULIMITS.get(usize::from(resource)).copied().unwrap_or_default();
                format!("sandbox.ulimits.{name}")
            }
            ExecStage::OomScoreAdj => "sandbox.oom_score_adj".to_owned(),
            ExecStage::Nice => "sandbox.nice".to_owned(),
            ExecStage::Capabilities => "sandbox.capabilities".to_owned(),
            ExecStage::NoNewPrivs => "sandbox.no_new_privs".to_owned(),
            ExecStage::Clone
            | ExecStage::Table
            | ExecStage::Session
            | ExecStage::Descriptors
            | ExecStage::Folder
            | ExecStage::User
            | ExecStage::Program
            | ExecStage::PidFile
            | ExecStage::TimedOut => return Err(source),
        };
        Ok(SandboxError::Host { field, source })
    }
}

/// The restrictions of one launch, for its processes and commands.
#[derive(Clone, Debug, Default)]
pub struct LaunchSandbox {
    pub restrictions: Restrictions,
    namespace: Option<Arc<OwnedFd>>,
    /// The fields that need the namespace.
    mount_fields: String,
}

/// The main process that a command belongs to, and the spec in effect in it.
#[derive(Clone, Copy)]
pub struct MainProcess<'a> {
    pub identity: &'a ProcessIdentity,
    pub live: &'a Spec,
}

impl LaunchSandbox {
    /// The sandbox of a new launch.
    pub async fn of_launch(spec: &Spec, rights: &Rights) -> Result<LaunchSandbox, SandboxError> {
        refuse_hidden(spec)?;
        LaunchSandbox::with(spec, rights, None).await
    }

    /// The sandbox of a command: the namespace of the main process or, without one, an equal new one.
    pub async fn of_command(
        spec: &Spec,
        rights: &Rights,
        main: Option<MainProcess<'_>>,
    ) -> Result<LaunchSandbox, SandboxError> {
        let is_same = |main: &MainProcess<'_>| {
            let same_user = main.live.identity.user == spec.identity.user;
            same_user && MountRules::of(&main.live.sandbox) == MountRules::of(&spec.sandbox)
        };
        let joined = match MountRules::of(&spec.sandbox) {
            Some(_) => main.filter(is_same).and_then(|main| namespace_of(main.identity)),
            None => None,
        };
        LaunchSandbox::with(spec, rights, joined).await
    }

    async fn with(
        spec: &Spec,
        rights: &Rights,
        joined: Option<OwnedFd>,
    ) -> Result<LaunchSandbox, SandboxError> {
        spec.sandbox.check()?;
        let restrictions = restrictions(&spec.sandbox);
        let Some(rules) = MountRules::of(&spec.sandbox) else {
            return Ok(LaunchSandbox { restrictions, ..LaunchSandbox::default() });
        };
        let mount_fields = rules.fields();
        let namespace = match joined {
            Some(namespace) => namespace,
            None => {
                let what = "set up the mounts of the sandbox";
                rights.run(FileWork::Launch, what, move |rights| mounts::build(&rules, rights)).await?
            }
        };
        Ok(LaunchSandbox { restrictions, namespace: Some(Arc::new(namespace)), mount_fields })
    }

    /// The mount namespace that the process enters.
    pub fn namespace(&self) -> Option<BorrowedFd<'_>> {
        self.namespace.as_ref().map(|namespace| namespace.as_fd())
    }
}

fn restrictions(sandbox: &Sandbox) -> Restrictions {
    let mut restrictions = Restrictions {
        oom_score_adj: sandbox.oom_score_adj,
        nice: sandbox.nice,
        no_new_privs: sandbox.no_new_privs == Some(true),
        ..Restrictions::default()
    };
    restrictions.umask = sandbox.umask.unwrap_or(restrictions.umask);
    restrictions.bounding = sandbox.capabilities.as_ref().map(|names| {
        let numbers = names.iter().filter_map(|name| capability_number(name));
        numbers.fold(0, |mask, number| mask | 1 << number)
    });
    for (name, limit) in &sandbox.ulimits {
        if let Some(number) = ulimit_number(name) {
            restrictions.limits[number] = Some((limit.soft, limit.hard));
        }
    }
    restrictions
}

/// Refuses paths of the spec that the process and the agent would see differently.
fn refuse_hidden(spec: &Spec) -> Result<(), SandboxError> {
    if spec.sandbox.private_tmp != Some(true) {
        return Ok(());
    }
    let is_hidden = |path: &str| mounts::PRIVATE.iter().any(|folder| Path::new(path).starts_with(folder));
    let is_daemon = spec.monitor.auto_type == AutoType::Resident
        && spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
    let identity = &spec.identity;
    let paths = [
        ("setup_path", Some(&identity.setup_path)),
        ("pid_path", Some(&identity.pid_path).filter(|_| is_daemon)),
    ];
    match paths.into_iter().find_map(|(field, path)| Some((field, path.filter(|path| is_hidden(path))?))) {
        Some((field, path)) => Err(SandboxError::Hidden { field, path: path.clone() }),
        None => Ok(()),
    }
}

/// The mount namespace of a process, if it is one that a privileged process set up and not the agent's own.
///
/// A process can create a namespace of its own in a new user namespace, and mount anything there. No command enters such a
/// namespace: the process would choose the programs of the command.
fn namespace_of(identity: &ProcessIdentity) -> Option<OwnedFd> {
    use rustix::fs::{Mode, OFlags, fstat, open, stat};
    let path = format!("/proc/{}/ns/mnt", identity.pid);
    let namespace = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    // Checked after the open: only then is it the namespace of this process.
    if !identity.is_current() {
        return None;
    }
    const NS_GET_USERNS: libc::Ioctl = 0xb701;
    // SAFETY: the request takes no argument.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS) };
    // SAFETY: a result that is not negative is a new descriptor, which no other code owns.
    let owner = (owner >= 0).then(|| unsafe { OwnedFd::from_raw_fd(owner) })?;
    let same = |one: &OwnedFd, other: &str| {
        let (one, other) = (fstat(one).ok()?, stat(other).ok()?);
        Some((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
    };
    let is_ours = same(&owner, "/proc/self/ns/user")? && !same(&namespace, "/proc/self/ns/mnt")?;
    is_ours.then_some(namespace)
}
