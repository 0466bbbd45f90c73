//! Walk of a path: every folder and link that the kernel passes when it resolves the path.

use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Maximum links of a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// A step of a walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathStep {
    /// A folder in which a name is looked up.
    Folder(PathBuf),
    /// A link that is followed.
    Link(PathBuf),
}

impl PathStep {
    pub fn path(&self) -> &Path {
        match self {
            PathStep::Folder(path) | PathStep::Link(path) => path,
        }
    }
}

/// The steps to a path, without the last entry itself. Each folder occurs once.
pub fn passed(path: &Path) -> io::Result<Vec<PathStep>> {
    let (mut steps, mut links) = (vec![PathStep::Folder(PathBuf::from("/"))], 0);
    let mut here = PathBuf::from("/");
    // The names that follow, the next one last.
    let mut rest: Vec<OsString> = names(&std::path::absolute(path)?);
    while let Some(name) = rest.pop() {
        if name == ".." {
            here.pop();
            continue;
        }
        let next = here.join(&name);
        if std::fs::symlink_metadata(&next)?.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(rustix::io::Errno::LOOP.into());
            }
            let target = std::fs::read_link(&next)?;
            if target.is_absolute() {
                here = PathBuf::from("/");
            }
            rest.extend(names(&target));
            steps.push(PathStep::Link(next));
            continue;
        }
        here = next;
        let step = PathStep::Folder(here.clone());
        if !rest.is_empty() && !steps.contains(&step) {
            steps.push(step);
        }
    }
    Ok(steps)
}

/// The names of a path, the first one last.
fn names(path: &Path) -> Vec<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().rev().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_and_link_of_a_path_is_passed() {
        let folder = tempfile::tempdir().expect("a folder");
        let real = folder.path().canonicalize().expect("a path");
        std::fs::create_dir_all(real.join("a/b")).expect("a folder");
        std::fs::create_dir(real.join("links")).expect("a folder");
        std::os::unix::fs::symlink("../a", real.join("links/one")).expect("a link");
        std::os::unix::fs::symlink(real.join("links/one"), real.join("two")).expect("a link");
        std::fs::write(real.join("a/b/file"), "").expect("a file");
        let steps = passed(&real.join("two/b/file")).expect("it is resolved");
        let has = |step: PathStep| assert!(steps.contains(&step), "{step:?} in {steps:?}");
        has(PathStep::Link(real.join("two")));
        has(PathStep::Link(real.join("links/one")));
        ["links", "a", "a/b"].iter().for_each(|name| has(PathStep::Folder(real.join(name))));
        has(PathStep::Folder(real.clone()));
        assert!(!steps.iter().any(|step| step.path().ends_with("file")));
    }
}
