//! The source of `abide watch`: paths, or a branch of a git repository.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::args::{InvalidValue, LimitArgs, parse_switch};
use crate::cli::commands::plan::args::duration;
use crate::cli::commands::watch::ControllerArgs;
use crate::cli::local::Home;
use crate::cli::{Exit, Failure};
use crate::control::spec_history::ManifestHistory;
use crate::manifest::Limits;
use crate::model::bytes;
use crate::source::directory::Directory;
use crate::source::git::{FetchLimits, Git, GitConfig, Signatures, version, work_tree};
use crate::source::{PostProcess, Source};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Source")]
pub struct SourceArgs {
    /// Follow a git repository instead of a PATH: https, ssh, git, file, or a path
    ///
    /// Credentials come from git's credential helpers and ssh keys, without a prompt. Pass a URL with a password in
    /// ABIDE_GIT: arguments are visible to every user of the host.
    #[arg(long, value_name = "URL", env = "ABIDE_GIT", hide_env_values = true)]
    pub git: Option<String>,
    /// With --git: branch or tag to follow [default: the repository's HEAD]
    #[arg(long = "ref", value_name = "REF", env = "ABIDE_GIT_REF")]
    pub reference: Option<String>,
    /// With --git: directory or file of manifests in the repository [default: the whole repository]
    #[arg(long, value_name = "P", env = "ABIDE_GIT_PATH")]
    pub path: Option<PathBuf>,
    /// With --git: accept only commits signed by a key in FILE, an ssh allowed-signers file or gpg public keys
    #[arg(long, value_name = "FILE", env = "ABIDE_VERIFY_SIGNATURES")]
    pub verify_signatures: Option<PathBuf>,
    /// With --verify-signatures: commits that must be signed: the tip, or all since the last accepted commit
    #[arg(long, value_name = "WHICH", env = "ABIDE_SIGNATURES", value_enum, requires = "verify_signatures")]
    pub signatures: Option<Signatures>,
    /// With --git: accept this tip although it does not descend from the last accepted commit
    #[arg(long, value_name = "COMMIT", env = "ABIDE_ACCEPT_REWIND")]
    pub accept_rewind: Option<String>,
    /// With --git: accept plain http:// or git:// to a host that is not loopback
    ///
    /// Anyone on the network path can then forge manifests and read credentials.
    #[arg(long, env = "ABIDE_INSECURE_GIT", value_parser = parse_switch)]
    pub insecure_git: bool,
    /// With --git: time limit of a fetch
    #[arg(long, value_name = "TIME", env = "ABIDE_GIT_TIMEOUT", default_value = "5m", value_parser = duration)]
    pub git_timeout: u64,
    /// With --git: maximum transfer size of one fetch, such as 512MB
    #[arg(long, value_name = "SIZE", env = "ABIDE_GIT_MAX_SIZE", default_value = "4GB", value_parser = parse_size)]
    pub git_max_size: u64,
    /// Poll file metadata every 2 s instead of using inotify (the default on network file systems)
    #[arg(long, env = "ABIDE_POLL", value_parser = parse_switch, conflicts_with = "git")]
    pub poll: bool,
}

fn parse_size(text: &str) -> Result<u64, InvalidValue> {
    bytes(text).filter(|size| *size > 0).ok_or(InvalidValue("a size such as 512MB or 1GiB"))
}

/// A validated source.
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
            if let Some((flag, _)) = only_git.into_iter().find(|(_, is_set)| *is_set) {
                let message = format!("{flag} needs --git, and the source is a PATH");
                return Err(Failure::new(Exit::Usage, message).hint("name the repository: --git URL"));
            }
            if paths.iter().any(|path| path.as_os_str() == "-") {
                let message = "cannot watch standard input: it can be read only once";
                return Err(Failure::new(Exit::Usage, message).hint("`abide apply -` applies it once"));
            }
            return Ok(WatchSource::Paths { paths: paths.to_vec(), only_poll: self.poll });
        };
        let config = GitConfig {
            url: url.clone(),
            reference: self.reference.clone().unwrap_or_else(|| "HEAD".to_owned()),
            path: self.path.clone().unwrap_or_default(),
            signers: self.verify_signatures.clone(),
            signatures: self.signatures.unwrap_or_default(),
            accept_rewind: self.accept_rewind.clone(),
            insecure: self.insecure_git,
            interval: how.reconcile_interval(),
            fetch: FetchLimits {
                timeout: Duration::from_secs(self.git_timeout.max(1)),
                max_pack: self.git_max_size,
            },
            folder: Home::find()?.path("git"),
            owner: how.owner().to_owned(),
            limits: limits.limits(),
        };
        let config = config.validated();
        let config = config.map_err(|error| Failure::new(Exit::Usage, error.message).hint(error.hint))?;
        version::check().map_err(|why| Failure::new(Exit::Failed, format!("--git: {why}")))?;
        Ok(WatchSource::Git(Box::new(config)))
    }
}

impl WatchSource {
    /// The source for display, without credentials.
    pub fn describe(&self) -> Vec<String> {
        match self {
            WatchSource::Paths { paths, .. } => paths.iter().map(|path| path.display().to_string()).collect(),
            WatchSource::Git(config) => {
                let path = config.path.display().to_string();
                let path = if path.is_empty() { path } else { format!(", {path}") };
                vec![format!("{} of {}{path}", config.reference, config.shown_url())]
            }
        }
    }

    /// The source as recorded with the active revision.
    pub fn source(&self) -> String {
        match self {
            WatchSource::Paths { paths, .. } => work_tree::of_paths(paths),
            WatchSource::Git(config) => work_tree::source(&config.url, &config.path.to_string_lossy()),
        }
    }

    /// The history of the manifests, for earlier specs.
    pub fn manifest_history(&self) -> ManifestHistory {
        match self {
            WatchSource::Paths { paths, .. } => ManifestHistory::Paths(paths.clone()),
            WatchSource::Git(config) => ManifestHistory::Git(config.clone()),
        }
    }

    pub fn open(self, limits: Limits, debounce: Duration, finish: PostProcess) -> Source {
        match self {
            WatchSource::Paths { paths, only_poll } => {
                Source::Directory(Box::new(Directory::new(paths, limits, debounce, only_poll, finish)))
            }
            WatchSource::Git(config) => Source::Git(Box::new(Git::new(*config, finish))),
        }
    }
}

/// The first 12 characters of an id.
pub fn short_id(id: &str) -> String {
    crate::cli::output::print::visible(id).chars().take(12).collect()
}
