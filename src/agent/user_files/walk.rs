//! Path walk: resolves a path component by component, and checks each link and file.
//!
//! The kernel's own resolution follows every link with the caller's rights. The walk opens each directory relative to its
//! parent and never through a link; it reads and checks a link first. So magic links of /proc become plain text.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fstat, fstatfs, mkdirat, open, openat, readlinkat, statat,
};

use crate::permissions::user_name;

/// Components that a walk accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkRule {
    /// All components that the kernel permits: the thread has exactly the user's rights.
    Any,
    /// Links of this user and root, and any link in a directory that only they can write. A file below a directory that
    /// others can write is checked.
    Trusting(u32),
    /// Components that belong to root and that no other user can write.
    RootOnly,
}

/// Reason why a file of a spec cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{0}")]
    Io(#[source] io::Error),
    #[error("the path is not absolute")]
    NotAbsolute,
    /// The file itself is a link.
    #[error("the file is a symbolic link")]
    Link,
    /// A link in the path that belongs to an untrusted user.
    #[error("{} is a symbolic link of user {}", .0.display(), user_name(*.1))]
    ForeignLink(PathBuf, u32),
    /// Not a regular file.
    #[error("the path is {0}, not a regular file")]
    Kind(&'static str),
    #[error("the file is larger than {0} bytes")]
    TooLarge(u64),
    /// A file of this user in a directory that others can write.
    #[error("the file belongs to user {} and others can write its directory", user_name(*.0))]
    Owner(u32),
    /// A file with several hard links in a directory that others can write.
    #[error("the file has several hard links and others can write its directory")]
    HardLinks,
    /// A component that others than root can write, under [`WalkRule::RootOnly`].
    #[error("the host policy lists the path, but {} can be written by others than root", .0.display())]
    Exposed(PathBuf),
    #[error("the file {0}")]
    Content(&'static str),
}

impl FileError {
    /// The error number of the system; `None`: the error is of another kind.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            FileError::Io(error) => error.raw_os_error(),
            _ => None,
        }
    }
}

impl From<rustix::io::Errno> for FileError {
    fn from(error: rustix::io::Errno) -> FileError {
        FileError::Io(error.into())
    }
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> FileError {
        FileError::Io(error)
    }
}

/// The purpose of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Append. A missing file is created with mode 0640.
    Append,
    /// Append to an existing file.
    AppendExisting,
    /// Use the content.
    Read,
    /// Compare the content with a known value. The content is not disclosed.
    Compare,
}

/// Maximum number of links in a path, as in the kernel.
const MAX_LINKS: u32 = 40;
const PROC_SUPER_MAGIC: u64 = 0x9fa0;

/// An open directory.
pub struct Folder {
    pub fd: OwnedFd,
    rule: WalkRule,
    /// An untrusted user can write this directory or one above it.
    exposed: bool,
}

/// The parent directory of a path, and the last component. `make`: creates missing directories.
pub fn parent(path: &Path, rule: WalkRule, make: bool) -> Result<(Folder, OsString), FileError> {
    let name = path.file_name().ok_or(FileError::NotAbsolute)?.to_owned();
    let parent = path.parent().ok_or(FileError::NotAbsolute)?;
    Ok((Folder::walk(parent, rule, make)?, name))
}

/// Opens a directory or a file as a location only: it can be neither read nor written by the descriptor.
pub fn locate(path: &Path, rule: WalkRule) -> Result<OwnedFd, FileError> {
    match Folder::walk(path, rule, false) {
        Err(FileError::Io(error)) if error.raw_os_error() == Some(libc::ENOTDIR) => {}
        walked => return walked.map(|folder| folder.fd),
    }
    let (folder, name) = parent(path, rule, false)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = openat(&folder.fd, &name, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&fd)?.st_mode) {
        FileType::Symlink => Err(FileError::Link),
        _ => Ok(fd),
    }
}

impl Folder {
    pub fn walk(path: &Path, rule: WalkRule, make: bool) -> Result<Folder, FileError> {
        if !path.is_absolute() {
            return Err(FileError::NotAbsolute);
        }
        let mut folder = Folder::root(rule, false)?;
        let (mut left, mut shown, mut links) = (names(path), PathBuf::from("/"), 0);
        while let Some(name) = left.pop_front() {
            if rule == WalkRule::RootOnly && name == ".." {
                return Err(FileError::Exposed(path.to_owned()));
            }
            shown.push(&name);
            match folder.enter(&name, make) {
                Ok(fd) => folder = folder.replace_fd(fd, &shown)?,
                Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(FileError::Io(io::Error::from_raw_os_error(libc::ELOOP)));
                    }
                    let target = folder.read_link(&name, &shown)?;
                    if target.is_absolute() {
                        (folder, shown) = (Folder::root(rule, folder.exposed)?, PathBuf::from("/"));
                    } else {
                        shown.pop();
                    }
                    for name in names(&target).into_iter().rev() {
                        left.push_front(name);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(folder)
    }

    fn root(rule: WalkRule, exposed: bool) -> Result<Folder, FileError> {
        let fd = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Folder { fd, rule, exposed })
    }

    fn enter(&self, name: &OsStr, make: bool) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&self.fd, name, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) if make => {
                match mkdirat(&self.fd, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => openat(&self.fd, name, flags, Mode::empty()),
                    Err(error) => Err(error),
                }
            }
            opened => opened,
        }
    }

    fn replace_fd(self, fd: OwnedFd, shown: &Path) -> Result<Folder, FileError> {
        let exposed = match self.rule {
            WalkRule::Any => false,
            WalkRule::Trusting(uid) => {
                let stat = fstat(&fd)?;
                self.exposed || stat.st_mode & 0o022 != 0 || ![0, uid].contains(&stat.st_uid)
            }
            WalkRule::RootOnly if is_root_only(&fstat(&fd)?) => false,
            WalkRule::RootOnly => return Err(FileError::Exposed(shown.to_owned())),
        };
        Ok(Folder { fd, rule: self.rule, exposed })
    }

    /// The target of a link, if the rule permits the walk to follow it.
    fn read_link(&self, name: &OsStr, shown: &Path) -> Result<PathBuf, FileError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = openat(&self.fd, name, flags, Mode::empty())?;
        let stat = fstat(&link)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Err(FileError::Io(io::Error::from_raw_os_error(libc::ENOTDIR)));
        }
        let trusted = match self.rule {
            WalkRule::Any => true,
            WalkRule::Trusting(uid) => !self.exposed || [0, uid].contains(&stat.st_uid),
            WalkRule::RootOnly => stat.st_uid == 0,
        };
        if !trusted {
            return Err(FileError::ForeignLink(shown.to_owned(), stat.st_uid));
        }
        // Read by the descriptor that was checked, not by name: the name may have been replaced.
        let target = readlinkat(&link, "", Vec::new())?;
        Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
    }

    /// Metadata of an entry, without following a link; `None`: no such entry.
    pub fn kind(&self, name: &OsStr) -> Result<Option<Stat>, FileError> {
        match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a regular file (or /dev/null). FIFOs and devices are refused by type before the open, which could block or have
    /// effects.
    pub fn open(&self, name: &OsStr, access: FileAccess) -> Result<File, FileError> {
        if let Some(stat) = self.kind(name)? {
            is_file(&stat)?;
        }
        let flags = match access {
            FileAccess::Append => OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE,
            FileAccess::AppendExisting => OFlags::WRONLY | OFlags::APPEND,
            FileAccess::Read | FileAccess::Compare => OFlags::RDONLY,
        };
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(&self.fd, name, flags, Mode::from_raw_mode(0o640));
        let fd = opened.map_err(|error| match error {
            rustix::io::Errno::LOOP => FileError::Link,
            error => error.into(),
        })?;
        // The entry may have been replaced since the first check: only the open descriptor counts.
        let stat = fstat(&fd)?;
        is_file(&stat)?;
        if u64::try_from(fstatfs(&fd)?.f_type) == Ok(PROC_SUPER_MAGIC) {
            return Err(FileError::Kind("a file of /proc"));
        }
        self.check(&stat, access)?;
        // Clears O_NONBLOCK: a program that inherits the descriptor as output expects blocking writes.
        rustix::fs::fcntl_setfl(&fd, flags & OFlags::APPEND)?;
        Ok(File::from(fd))
    }

    /// Checks a file against the rule: in a directory that others can write, an entry may be a file of another user.
    fn check(&self, stat: &Stat, access: FileAccess) -> Result<(), FileError> {
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        match self.rule {
            WalkRule::RootOnly if !regular || is_root_only(stat) && stat.st_nlink == 1 => Ok(()),
            WalkRule::RootOnly if stat.st_nlink != 1 => Err(FileError::HardLinks),
            WalkRule::RootOnly => Err(FileError::Owner(stat.st_uid)),
            WalkRule::Trusting(uid) if self.exposed && regular && access != FileAccess::Compare => {
                let appends = matches!(access, FileAccess::Append | FileAccess::AppendExisting);
                if appends && ![0, uid].contains(&stat.st_uid) {
                    return Err(FileError::Owner(stat.st_uid));
                }
                if stat.st_nlink != 1 { Err(FileError::HardLinks) } else { Ok(()) }
            }
            WalkRule::Any | WalkRule::Trusting(_) => Ok(()),
        }
    }
}

fn names(path: &Path) -> VecDeque<OsString> {
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(name).collect()
}

fn is_root_only(stat: &Stat) -> bool {
    stat.st_uid == 0 && stat.st_mode & 0o022 == 0
}

/// Accepts a regular file or /dev/null.
fn is_file(stat: &Stat) -> Result<(), FileError> {
    let null = rustix::fs::makedev(1, 3);
    Err(FileError::Kind(match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(()),
        FileType::CharacterDevice if stat.st_rdev == null => return Ok(()),
        FileType::Symlink => return Err(FileError::Link),
        FileType::Directory => "a directory",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "a file of unknown type",
    }))
}
