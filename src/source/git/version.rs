//! Git version check: a git without `GIT_NO_LAZY_FETCH` is refused.
//!
//! In a partial clone such a git fetches missing objects during reads, with any program that the repository's
//! configuration names. The variable prevents that; a git that ignores it would run foreign code.

use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// First version of each release line with the variable; later lines all have it.
const FIRST_SAFE_VERSIONS: [(u32, u32, u32); 7] =
    [(2, 39, 4), (2, 40, 2), (2, 41, 1), (2, 42, 2), (2, 43, 4), (2, 44, 1), (2, 45, 0)];

/// Reason why this machine's git is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VersionError {
    #[error("cannot determine the version of git: `git --version` prints no version")]
    Unknown,
    #[error(
        "git {0}.{1}.{2} does not know GIT_NO_LAZY_FETCH: reading a partial clone could run programs that its \
         configuration names; git 2.45 or newer is needed (or 2.39.4, 2.40.2, 2.41.1, 2.42.2, 2.43.4, 2.44.1)"
    )]
    TooOld(u32, u32, u32),
}

/// Checked once. A git that cannot run reports that when it is used.
pub fn check() -> Result<(), VersionError> {
    static CHECKED: OnceLock<Result<(), VersionError>> = OnceLock::new();
    CHECKED
        .get_or_init(|| {
            let output =
                Command::new("git").arg("--version").stdin(Stdio::null()).env("LC_ALL", "C").output();
            match output {
                Ok(output) => check_version(&String::from_utf8_lossy(&output.stdout)),
                Err(_) => Ok(()),
            }
        })
        .clone()
}

fn check_version(output: &str) -> Result<(), VersionError> {
    let version = output.trim().strip_prefix("git version ").unwrap_or_default();
    let mut numbers = version.split(['.', ' ', '-']).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok);
    let (Some(major), Some(minor)) = (next(), next()) else {
        return Err(VersionError::Unknown);
    };
    let found = (major, minor, next().unwrap_or(0));
    let line = FIRST_SAFE_VERSIONS.iter().find(|known| (known.0, known.1) == (major, minor));
    let knows =
        line.map_or(found > FIRST_SAFE_VERSIONS[FIRST_SAFE_VERSIONS.len() - 1], |first| found >= *first);
    match knows {
        true => Ok(()),
        false => Err(VersionError::TooOld(found.0, found.1, found.2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_git_that_could_fetch_while_it_reads_is_refused() {
        for good in [
            "2.45.0",
            "2.47.3",
            "2.39.5 (Apple Git-154)",
            "2.44.1.windows.1",
            "2.100.0",
            "3.0.1",
            "2.45.0-rc1",
        ] {
            assert_eq!(check_version(&format!("git version {good}\n")), Ok(()), "{good}");
        }
        for old in ["2.34.1", "2.39.3", "2.43.0", "2.44.0", "1.9.5", "2.38.9"] {
            let why = check_version(&format!("git version {old}\n")).expect_err(old).to_string();
            assert!(why.contains(old) && why.contains("GIT_NO_LAZY_FETCH"), "{why}");
        }
        assert!(check_version("").is_err() && check_version("hub version 2").is_err());
    }
}
