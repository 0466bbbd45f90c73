//! Permissions of files and folders: which other users can change or read them.
//!
//! The agent and the gateway trust the content of their folders, token files and policy files. That is safe only if no
//! other user can write there: the owner must be root or the trusted user, and neither group nor others may write. A
//! group without other members counts as the owner's own ("user private groups", umask 002). The same holds for every
//! folder above, whose owner could replace the path, and for the entries of an access control list.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const STICKY: u32 = 0o1000;
const GROUP_WRITE: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const GROUP_READ: u32 = 0o040;
const OTHERS_READ: u32 = 0o004;

mod acl;
mod walk;

use self::walk::PathStep;

/// The user that this process runs as.
pub fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Reason why a path is not safe, with the command that corrects it.
#[derive(Debug, thiserror::Error)]
pub enum PermissionError {
    #[error("cannot check {}", path.display())]
    Check { path: PathBuf, source: std::io::Error },
    #[error("cannot check the folder {}", path.display())]
    CheckFolder { path: PathBuf, source: std::io::Error },
    #[error("{} belongs to user {owner}, not to {expected}{remedy}", path.display())]
    ForeignOwner { path: PathBuf, owner: String, expected: String, remedy: String },
    #[error("{shown} is writable by every user: run `chmod go-w {shown}`", shown = path.display())]
    WritableByAll { path: PathBuf },
    #[error("{shown} is writable by group {group}: run `chmod g-w {shown}`", shown = path.display())]
    WritableByGroup { path: PathBuf, group: String },
    #[error("{shown} is writable by {who} (access control list): run `setfacl -b {shown}`", shown = path.display())]
    WritableByAcl { path: PathBuf, who: String },
    #[error("cannot protect {}", path.display())]
    Protect { path: PathBuf, source: std::io::Error },
}

/// Refuses a path that a user other than root and `trusted` can change.
pub fn refuse_changeable(path: &Path, trusted: u32) -> Result<Metadata, PermissionError> {
    let unknown = |source| PermissionError::Check { path: path.to_owned(), source };
    let meta = std::fs::metadata(path).map_err(unknown)?;
    refuse_owner(path, &meta, trusted, || remedy(path, &meta, trusted))?;
    refuse_writable(path, &meta, trusted)?;
    if !meta.is_file() && !meta.is_dir() {
        // A pipe has no folder: `--token-file <(command)`.
        return Ok(meta);
    }
    for passed in walk::passed(path).map_err(unknown)? {
        let (folder, failed) = (passed.path(), passed.path().to_owned());
        let meta = std::fs::symlink_metadata(folder)
            .map_err(|source| PermissionError::CheckFolder { path: failed, source })?;
        // A folder in the path may be a user's home, which `chown` would break.
        let (shown, own) = (path.display(), user_name(trusted));
        let elsewhere = || format!(": move {shown} to a folder that only {own} can write");
        match passed {
            // In a sticky folder only the owner of an entry can rename or remove it.
            PathStep::Folder(_) if meta.mode() & STICKY != 0 => {
                refuse_owner(folder, &meta, trusted, elsewhere)?
            }
            PathStep::Folder(_) => {
                refuse_owner(folder, &meta, trusted, elsewhere)?;
                refuse_writable(folder, &meta, trusted)?;
            }
            PathStep::Link(_) if is_sticky(folder.parent()) => {
                refuse_owner(folder, &meta, trusted, elsewhere)?
            }
            // Its folder was checked: no other user can exchange the link.
            PathStep::Link(_) => {}
        }
    }
    Ok(meta)
}

/// The same, and refuses a file that its group can write, even if the group has no other member: a later member of the
/// group could write it without a change of the file.
pub fn refuse_changeable_by_group(path: &Path, trusted: u32) -> Result<Metadata, PermissionError> {
    let meta = refuse_changeable(path, trusted)?;
    if meta.mode() & GROUP_WRITE != 0 {
        let group = group_name(meta.gid());
        return Err(PermissionError::WritableByGroup { path: path.to_owned(), group });
    }
    Ok(meta)
}

fn is_sticky(folder: Option<&Path>) -> bool {
    folder.and_then(|folder| std::fs::metadata(folder).ok()).is_some_and(|meta| meta.mode() & STICKY != 0)
}

fn refuse_owner(
    path: &Path,
    meta: &Metadata,
    trusted: u32,
    remedy: impl FnOnce() -> String,
) -> Result<(), PermissionError> {
    if meta.uid() == 0 || meta.uid() == trusted {
        return Ok(());
    }
    let or_root = if trusted == 0 { "" } else { " or root" };
    Err(PermissionError::ForeignOwner {
        path: path.to_owned(),
        owner: user_name(meta.uid()),
        expected: format!("{}{or_root}", user_name(trusted)),
        remedy: remedy(),
    })
}

/// Hint for a path of another user. `chown` is suggested only for files and folders of Abide: after a `chown`, a pid file
/// of another user would count as proof, and a home folder would be lost to its user.
fn remedy(path: &Path, meta: &Metadata, trusted: u32) -> String {
    let home = nix::unistd::User::from_uid(meta.uid().into()).ok().flatten().map(|user| user.dir);
    let is_home = || home.and_then(|home| home.canonicalize().ok()) == path.canonicalize().ok();
    let (own, shown) = (user_name(trusted), path.display());
    match trusted == own_uid() && (meta.is_file() || meta.is_dir()) {
        true if is_home() => {
            format!(": use another folder, this is the home of user {}", user_name(meta.uid()))
        }
        true => format!(": check its content, then run `chown {own} {shown}`"),
        false => String::new(),
    }
}

fn refuse_writable(path: &Path, meta: &Metadata, trusted: u32) -> Result<(), PermissionError> {
    if let Some(who) = acl::others(path, trusted, acl::WRITE) {
        return Err(PermissionError::WritableByAcl { path: path.to_owned(), who });
    }
    let path = path.to_owned();
    if meta.mode() & OTHERS_WRITE != 0 {
        return Err(PermissionError::WritableByAll { path });
    }
    if meta.mode() & GROUP_WRITE != 0 && !is_private_group(meta.gid(), meta.uid()) {
        let group = group_name(meta.gid());
        return Err(PermissionError::WritableByGroup { path, group });
    }
    Ok(())
}

/// Other users that can read a path that holds secrets; `None`: only its owner and root.
pub fn readers(meta: &Metadata) -> Option<String> {
    if meta.mode() & OTHERS_READ != 0 {
        return Some("every user".to_owned());
    }
    let by_group = meta.mode() & GROUP_READ != 0 && !is_private_group(meta.gid(), meta.uid());
    by_group.then(|| format!("group {}", group_name(meta.gid())))
}

/// Checks a folder or file that holds secrets: refuses one that another user can change, and returns a warning for one
/// that another user can read.
pub fn check_private(path: &Path) -> Result<Option<String>, PermissionError> {
    let meta = refuse_changeable(path, own_uid())?;
    let shown = path.display();
    let mode = if meta.is_dir() { "700" } else { "600" };
    if let Some(who) = acl::others(path, own_uid(), acl::READ) {
        return Ok(Some(format!("{shown} is readable by {who}: run `setfacl -b {shown}`")));
    }
    Ok(readers(&meta).map(|who| format!("{shown} is readable by {who}: run `chmod {mode} {shown}`")))
}

/// The same, and logs the warning.
pub fn require_private(path: &Path) -> Result<(), PermissionError> {
    if let Some(warning) = check_private(path)? {
        tracing::warn!("{warning}");
    }
    Ok(())
}

/// Removes all group and other permissions from the files of a store, where they exist.
pub fn close_to_others(folder: &Path, names: &[&str]) -> Result<(), PermissionError> {
    use std::os::unix::fs::PermissionsExt;
    for file in names.iter().map(|name| folder.join(name)).filter(|file| file.exists()) {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600))
            .map_err(|source| PermissionError::Protect { path: file, source })?;
    }
    Ok(())
}

/// Whether the user is the only member of a group.
fn is_private_group(gid: u32, uid: u32) -> bool {
    let Ok(Some(user)) = nix::unistd::User::from_uid(uid.into()) else { return false };
    let Ok(Some(group)) = nix::unistd::Group::from_gid(gid.into()) else { return false };
    let Ok(passwd) = std::fs::read_to_string("/etc/passwd") else { return false };
    // NAME:x:UID:GID:…
    let has_primary = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next().unwrap_or_default();
        name != user.name && fields.nth(2).and_then(|text| text.parse::<u32>().ok()) == Some(gid)
    };
    user.gid.as_raw() == gid
        && group.mem.iter().all(|member| *member == user.name)
        && !passwd.lines().any(has_primary)
}

pub fn user_name(uid: u32) -> String {
    match nix::unistd::User::from_uid(uid.into()) {
        Ok(Some(user)) => user.name,
        Ok(None) | Err(_) => uid.to_string(),
    }
}

fn group_name(gid: u32) -> String {
    match nix::unistd::Group::from_gid(gid.into()) {
        Ok(Some(group)) => group.name,
        Ok(None) | Err(_) => gid.to_string(),
    }
}

/// A path without `.` and `..`, with the symlinks of its longest existing part resolved. `None`: relative, with `..`, or
/// with a dangling symlink.
pub fn resolved(path: &Path) -> Option<PathBuf> {
    use std::path::Component;
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return None;
    }
    let existing = path.ancestors().find_map(|part| Some((part, part.canonicalize().ok()?)))?;
    let rest = path.strip_prefix(existing.0).ok()?;
    // The target of a dangling symlink may be created later.
    let dangles = rest.components().next().is_some_and(|next| existing.1.join(next).is_symlink());
    if dangles {
        return None;
    }
    Some(if rest.as_os_str().is_empty() { existing.1 } else { existing.1.join(rest) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn set(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("a mode");
    }

    /// A user who owns a folder can exchange a link in it between the check and the use.
    #[test]
    fn a_link_in_a_folder_of_another_user_is_refused() {
        if own_uid() != 0 {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("real/inner")).expect("a folder");
        std::fs::write(at("real/inner/token"), "x").expect("a file");
        ["real", "real/inner"].iter().for_each(|name| set(&at(name), 0o700));
        set(&at("real/inner/token"), 0o600);
        for name in ["own", "foreign", "sticky"] {
            std::fs::create_dir(at(name)).expect("a folder");
            std::os::unix::fs::symlink("../real/inner", at(name).join("link")).expect("a link");
        }
        std::os::unix::fs::chown(at("foreign"), Some(65_534), None).expect("an owner");
        set(&at("sticky"), 0o1777);
        std::os::unix::fs::lchown(at("sticky/link"), Some(65_534), None).expect("an owner");
        let refused =
            |name: &str| refuse_changeable(&at(name).join("link/token"), 0).map_err(|why| why.to_string());
        assert!(refused("own").is_ok(), "{:?}", refused("own"));
        for name in ["foreign", "sticky/../foreign/../sticky", "sticky"] {
            assert!(refused(name).is_err_and(|why| why.contains("belongs to user")), "{name}");
        }
        std::os::unix::fs::symlink("loop", at("loop")).expect("a link");
        assert!(refuse_changeable(&at("loop"), 0).is_err());
    }

    #[test]
    fn a_link_in_a_folder_of_others_is_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("policy"), "x").expect("a file");
        set(&at("policy"), 0o600);
        for name in ["own", "open"] {
            std::fs::create_dir(at(name)).expect("a folder");
        }
        set(&at("own"), 0o700);
        symlink("../policy", at("own/link")).expect("a link");
        symlink("../policy", at("open/link")).expect("a link");
        symlink(at("open/link"), at("own/far")).expect("a link");
        symlink("open", at("folder")).expect("a link");
        set(&at("open"), 0o777);
        assert!(refuse_changeable(&at("own/link"), own_uid()).is_ok(), "a link in an own folder");
        for name in ["open/link", "own/far", "folder/link", "own/../open/link"] {
            let refused = refuse_changeable(&at(name), own_uid()).expect_err(name).to_string();
            assert!(refused.contains("open is writable by every user"), "{name}: {refused}");
        }
    }

    #[test]
    fn a_writable_file_or_folder_is_refused_and_a_readable_one_is_warned_of() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("inner");
        std::fs::create_dir(&inner).expect("a folder");
        let file = inner.join("token");
        std::fs::write(&file, "x").expect("a file");
        set(&inner, 0o700);
        for (mode, expected) in [
            (0o600, ""),
            (0o400, ""),
            (0o604, "every user"),
            (0o644, "every user"),
            (0o602, "chmod go-w"),
            (0o666, "chmod go-w"),
        ] {
            set(&file, mode);
            let said = check_private(&file).map(Option::unwrap_or_default);
            let said = said.unwrap_or_else(|refused| format!("refused: {refused}"));
            assert_eq!(said.is_empty(), expected.is_empty(), "{mode:o}: {said}");
            assert!(
                said.contains(expected) && said.starts_with("refused") == (mode & 2 != 0),
                "{mode:o}: {said}"
            );
        }
        set(&file, 0o600);
        set(&inner, 0o777);
        assert!(
            check_private(&file)
                .is_err_and(|why| why.to_string().contains("inner is writable by every user"))
        );
        set(&inner, 0o1777);
        assert!(check_private(&file).is_ok(), "a sticky folder protects its entries");
        assert!(check_private(&inner).is_err(), "but new entries can be made there");
    }

    #[test]
    fn paths_are_resolved_as_far_as_they_exist() {
        let folder = tempfile::tempdir().expect("a folder");
        let real = folder.path().canonicalize().expect("a folder");
        std::os::unix::fs::symlink("/etc", folder.path().join("link")).expect("a link");
        assert_eq!(resolved(&folder.path().join("a/b")), Some(real.join("a/b")));
        assert_eq!(resolved(&folder.path().join("link/x")), Some(PathBuf::from("/etc/x")));
        assert_eq!(resolved(&folder.path().join("a/../../b")), None);
        assert_eq!(resolved(Path::new("relative")), None);
        std::os::unix::fs::symlink("/no/such", folder.path().join("nowhere")).expect("a link");
        assert_eq!(resolved(&folder.path().join("nowhere")), None);
    }
}
