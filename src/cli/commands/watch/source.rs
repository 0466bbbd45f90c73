//! What `abide watch` watches: paths, or a branch of a git repository.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::args::{LimitArgs, parse_switch};
use crate::cli::commands::plan::args::duration;
use crate::cli::commands::watch::ControllerArgs;
use crate::cli::local::Home;
use crate::cli::{Exit, Failure};
use crate::control::source::directory::Directory;
use crate::control::source::git::{Git, GitConfig, Signatures, version, work_tree};
use crate::control::source::{PostProcess, Source};
use crate::control::spec_history::ManifestHistory;
use crate::manifest::Limits;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Source")]
pub struct SourceArgs {
    /// Follow a git repository instead of a PATH: https, ssh, git, file, or a path
    ///
    /// Credentials come from git's own helpers and ssh's keys; nothing is ever asked. A URL with a password belongs into
    /// ABIDE_GIT: arguments are visible to every user of the machine.
    #[arg(long, value_name = "URL", env = "ABIDE_GIT", hide_env_values = true)]
    pub git: Option<String>,
    /// With --git: the branch or tag to follow [default: the repository's HEAD]
    #[arg(long = "ref", value_name = "REF", env = "ABIDE_GIT_REF")]
    pub reference: Option<String>,
    /// With --git: the directory or file of manifests in the repository [default: all of it]
    #[arg(long, value_name = "P", env = "ABIDE_GIT_PATH")]
    pub path: Option<PathBuf>,
    /// With --git: take only tips that are signed by somebody in FILE, an ssh allowed-signers file or gpg public keys
    #[arg(long, value_name = "FILE", env = "ABIDE_VERIFY_SIGNATURES")]
    pub verify_signatures: Option<PathBuf>,
    /// With --verify-signatures: which commits must be signed: the tip, or all since the commit taken last
    #[arg(long, value_name = "WHICH", env = "ABIDE_SIGNATURES", value_enum, requires = "verify_signatures")]
    pub signatures: Option<Signatures>,
    /// With --git: take this tip though it does not follow from the commit taken last
    #[arg(long, value_name = "COMMIT", env = "ABIDE_ACCEPT_REWIND")]
    pub accept_rewind: Option<String>,
    /// With --git: accept plain http:// or git:// to a host that is not loopback
    ///
    /// Anyone on the network path can then forge manifests and read credentials.
    #[arg(long, env = "ABIDE_INSECURE_GIT", value_parser = parse_switch)]
    pub insecure_git: bool,
    /// With --git: how long a fetch may take
    #[arg(long, value_name = "TIME", env = "ABIDE_GIT_TIMEOUT", default_value = "5m", value_parser = duration)]
    pub git_timeout: u64,
    /// Compare the files' metadata every 2 s instead of being told by the kernel (done anyway on network file systems)
    #[arg(long, env = "ABIDE_POLL", value_parser = parse_switch, conflicts_with = "git")]
    pub poll: bool,
}

/// What is watched, checked.
pub enum WatchSource {
    Paths { paths: Vec<PathBuf>, only_poll: bool },
    Git(Box<GitConfig>),
}

impl SourceArgs {
    pub fn resolve(
        &self,
        paths: &[PathBuf],
        limits: &LimitArgs,
        how: &ControllerArgs,
    ) -> Result<WatchSource, Failure> {
        let Some(url) = &self.git else {
            let only_git = [
                ("--ref", self.reference.is_some()),
                ("--path", self.path.is_some()),
                ("--verify-signatures", self.verify_signatures.is_some()),
                ("--signatures", self.signatures.is_some()),
                ("--accept-rewind", self.accept_rewind.is_some()),
                ("--insecure-git", self.insecure_git),
            ];
            if let Some((flag, _)) = only_git.into_iter().find(|(_, is_there)| *is_there) {
                let message = format!("{flag} is about a git repository, and a PATH is watched");
                return Err(Failure::new(Exit::Usage, message).hint("name the repository: --git URL"));
            }
            if paths.iter().any(|path| path.as_os_str() == "-") {
                let message = "standard input is read once: it cannot be watched";
                return Err(Failure::new(Exit::Usage, message).hint("`abide apply -` makes it true once"));
            }
            return Ok(WatchSource::Paths { paths: paths.to_vec(), only_poll: self.poll });
        };
        let setting = GitConfig {
            url: url.clone(),
            reference: self.reference.clone().unwrap_or_else(|| "HEAD".to_owned()),
            path: self.path.clone().unwrap_or_default(),
            signers: self.verify_signatures.clone(),
            signatures: self.signatures.unwrap_or_default(),
            accept_rewind: self.accept_rewind.clone(),
            insecure: self.insecure_git,
            interval: how.reconcile_interval(),
            timeout: Duration::from_secs(self.git_timeout.max(1)),
            folder: Home::find()?.path("git"),
            owner: how.owner().to_owned(),
            limits: limits.limits(),
        };
        let setting = setting.validated();
        let setting = setting.map_err(|(message, hint)| Failure::new(Exit::Usage, message).hint(hint))?;
        version::check().map_err(|why| Failure::new(Exit::Failed, format!("--git: {why}")))?;
        Ok(WatchSource::Git(Box::new(setting)))
    }
}

impl WatchSource {
    /// What it is, as people may see it.
    pub fn describe(&self) -> Vec<String> {
        match self {
            WatchSource::Paths { paths, .. } => paths.iter().map(|path| path.display().to_string()).collect(),
            WatchSource::Git(setting) => {
                let path = setting.path.display().to_string();
                let path = if path.is_empty() { path } else { format!(", {path}") };
                vec![format!("{} of {}{path}", setting.reference, setting.shown_url())]
            }
        }
    }

    /// Where manifests come from, as it is remembered.
    pub fn source(&self) -> String {
        match self {
            WatchSource::Paths { paths, .. } => work_tree::of_paths(paths),
            WatchSource::Git(setting) => work_tree::source(&setting.url, &setting.path.to_string_lossy()),
        }
    }

    /// Where older manifests are.
    pub fn manifest_history(&self) -> ManifestHistory {
        match self {
            WatchSource::Paths { paths, .. } => ManifestHistory::Paths(paths.clone()),
            WatchSource::Git(setting) => ManifestHistory::Git(setting.clone()),
        }
    }

    pub fn open(self, limits: Limits, debounce: Duration, finish: PostProcess) -> Source {
        match self {
            WatchSource::Paths { paths, only_poll } => {
                Source::Directory(Box::new(Directory::new(paths, limits, debounce, only_poll, finish)))
            }
            WatchSource::Git(setting) => Source::Git(Box::new(Git::new(*setting, finish))),
        }
    }
}

/// As much of an id as people compare.
pub fn short_id(id: &str) -> String {
    crate::cli::output::print::visible(id).chars().take(12).collect()
}
