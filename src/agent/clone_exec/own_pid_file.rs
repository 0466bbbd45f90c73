//! Own pid file: the pid file that a new process writes itself, with its user's rights, right before `execve`.
//!
//! The process may share the launcher's memory. So this uses system calls and the stack alone. It covers a
//! file that does not exist and a file to replace, in a directory that exists; in every other case it fails, and the agent
//! writes the file or explains the error.

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};

use super::syscall::call;
use crate::agent::fresh_id;
use crate::agent::user_files::ExistingPidFile;

/// The parts of a pid file's path. The temporary name is random: no other user can guess it or have created it.
#[derive(Clone, Debug)]
pub struct OwnPidFile {
    pub folder: CString,
    pub name: CString,
    pub temporary: CString,
    pub existing: ExistingPidFile,
    /// Links in the path are followed. A process of the agent's own user must not follow the links of other users.
    pub follows_links: bool,
}

impl OwnPidFile {
    /// The file of another user. `None`: the path is not absolute, or names no file.
    pub fn new(path: &Path, existing: ExistingPidFile) -> Option<OwnPidFile> {
        let (folder, name) = (path.parent()?, path.file_name()?);
        let text = |bytes: &[u8]| CString::new(bytes).ok();
        let temporary = text(format!(".abide-{}", fresh_id()).as_bytes())?;
        let (folder, name) = (text(folder.as_os_str().as_bytes())?, text(name.as_bytes())?);
        path.is_absolute().then_some(OwnPidFile { folder, name, temporary, existing, follows_links: true })
    }

    /// The file of the agent's own user. `None`: as above, or there is a link in the path or no such directory.
    pub fn without_links(path: &Path, existing: ExistingPidFile) -> Option<OwnPidFile> {
        let file = OwnPidFile { follows_links: false, ..OwnPidFile::new(path, existing)? };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat2(CWD, &file.folder, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).ok()?;
        Some(file)
    }
}

/// The same, as the new process reads it.
#[derive(Clone, Copy)]
pub struct ChildPidFile {
    pub folder: *const c_char,
    pub name: *const c_char,
    pub temporary: *const c_char,
    pub existing: ExistingPidFile,
    pub follows_links: bool,
}

/// Maximum size of a pid file that is replaced or removed.
const MAX_BYTES: usize = 64;
const RESOLVE_NO_MAGICLINKS: u64 = 2;
const RESOLVE_NO_SYMLINKS: u64 = 4;

/// `struct open_how` of the kernel.
#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// A pid file in its open directory.
struct OpenFolder {
    fd: usize,
    file: ChildPidFile,
}

impl ChildPidFile {
    /// Writes the pid of this process. An error: its number.
    ///
    /// SAFETY: the texts must be valid, and the process must have its user's rights.
    pub unsafe fn write(&self) -> Result<(), c_int> {
        // SAFETY: as promised by the caller.
        unsafe {
            let folder = self.open_folder()?;
            let replaced = folder.is_replaced();
            match (replaced, self.existing) {
                (Ok(true), ExistingPidFile::Refuse) => return Err(libc::EEXIST),
                (Ok(true), ExistingPidFile::Replace) => folder.check_replaceable()?,
                (Ok(false), _) => {}
                (Err(error), _) => return Err(error),
            }
            folder.create()
        }
    }

    /// Removes the file if it names this process.
    ///
    /// SAFETY: as above.
    pub unsafe fn remove(&self) {
        // SAFETY: as promised by the caller.
        unsafe {
            let Ok(folder) = self.open_folder() else { return };
            let (mut content, mut own) = ([0; MAX_BYTES], [0; MAX_BYTES]);
            let length = folder.read(&mut content).unwrap_or(0);
            if content[..length] == *own_pid(&mut own) {
                let _ = call(libc::SYS_unlinkat, [folder.fd, self.name as usize, 0]);
            }
        }
    }

    /// Opens the directory. The kernel resolves the path with the user's rights; links of /proc to open files and
    /// directories are refused.
    ///
    /// SAFETY: as above.
    unsafe fn open_folder(&self) -> Result<OpenFolder, c_int> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let how = OpenHow {
            flags: flags as u64,
            mode: 0,
            resolve: if self.follows_links { RESOLVE_NO_MAGICLINKS } else { RESOLVE_NO_SYMLINKS },
        };
        let (here, how) = (libc::AT_FDCWD as usize, &raw const how as usize);
        // SAFETY: the path is valid, and the kernel reads a local variable.
        let fd = unsafe { call(libc::SYS_openat2, [here, self.folder as usize, how, size_of::<OpenHow>()])? };
        Ok(OpenFolder { fd, file: *self })
    }
}

impl OpenFolder {
    /// Whether the file exists.
    ///
    /// SAFETY: as for [`ChildPidFile::write`].
    unsafe fn is_replaced(&self) -> Result<bool, c_int> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        let (name, at) = (self.file.name as usize, stat.as_mut_ptr() as usize);
        let flags = libc::AT_SYMLINK_NOFOLLOW as usize;
        // SAFETY: the kernel writes a local variable.
        match unsafe { call(libc::SYS_newfstatat, [self.fd, name, at, flags]) } {
            Ok(_) => Ok(true),
            Err(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the beginning of the file, which must be a regular file and not one of /proc.
    ///
    /// SAFETY: as for [`ChildPidFile::write`].
    unsafe fn read(&self, content: &mut [u8; MAX_BYTES]) -> Result<usize, c_int> {
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: the kernel writes local variables, and the descriptor is this function's own.
        unsafe {
            let mut stat = MaybeUninit::<libc::stat>::zeroed();
            let at = stat.as_mut_ptr() as usize;
            // A FIFO or a device is refused before the open, which could have effects.
            let no_follow = libc::AT_SYMLINK_NOFOLLOW as usize;
            call(libc::SYS_newfstatat, [self.fd, self.file.name as usize, at, no_follow])?;
            let is_regular = |stat: &libc::stat| stat.st_mode & libc::S_IFMT == libc::S_IFREG;
            if !is_regular(&stat.assume_init()) {
                return Err(libc::EINVAL);
            }
            let fd = call(libc::SYS_openat, [self.fd, self.file.name as usize, flags as usize])?;
            let mut system = MaybeUninit::<libc::statfs>::zeroed();
            call(libc::SYS_fstat, [fd, at])?;
            call(libc::SYS_fstatfs, [fd, system.as_mut_ptr() as usize])?;
            if !is_regular(&stat.assume_init()) || system.assume_init().f_type == libc::PROC_SUPER_MAGIC {
                return Err(libc::EINVAL);
            }
            let length = call(libc::SYS_read, [fd, content.as_mut_ptr() as usize, MAX_BYTES]);
            let _ = call(libc::SYS_close, [fd]);
            length
        }
    }

    /// Checks that the file is empty or has a pid as its first line: a wrong path must not destroy another file.
    ///
    /// SAFETY: as for [`ChildPidFile::write`].
    unsafe fn check_replaceable(&self) -> Result<(), c_int> {
        let mut content = [0; MAX_BYTES];
        // SAFETY: as promised by the caller.
        let length = unsafe { self.read(&mut content)? };
        let line = content[..length].split(|byte| *byte == b'\n').next().unwrap_or_default();
        match line.iter().all(|byte| byte.is_ascii_digit()) && line.len() <= 10 {
            true => Ok(()),
            false => Err(libc::EINVAL),
        }
    }

    /// Creates the file under its temporary name, and renames it.
    ///
    /// SAFETY: as for [`ChildPidFile::write`].
    unsafe fn create(&self) -> Result<(), c_int> {
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let (temporary, name) = (self.file.temporary as usize, self.file.name as usize);
        // SAFETY: the texts are valid, and the kernel reads a local buffer.
        unsafe {
            let fd = call(libc::SYS_openat, [self.fd, temporary, flags as usize, 0o644])?;
            let mut buffer = [0; MAX_BYTES];
            let own = own_pid(&mut buffer);
            let written = call(libc::SYS_write, [fd, own.as_ptr() as usize, own.len()]);
            let _ = call(libc::SYS_close, [fd]);
            let written = match written {
                Ok(length) if length == own.len() => self.rename(temporary, name),
                Ok(_) => Err(libc::ENOSPC),
                Err(error) => Err(error),
            };
            if written.is_err() {
                let _ = call(libc::SYS_unlinkat, [self.fd, temporary, 0]);
            }
            written
        }
    }

    /// SAFETY: as for [`ChildPidFile::write`].
    unsafe fn rename(&self, from: usize, to: usize) -> Result<(), c_int> {
        let rename = |flags: libc::c_uint| {
            // SAFETY: the texts are valid.
            unsafe { call(libc::SYS_renameat2, [self.fd, from, self.fd, to, flags as usize]) }
        };
        let renamed = match self.file.existing {
            ExistingPidFile::Replace => rename(0),
            ExistingPidFile::Refuse => match rename(libc::RENAME_NOREPLACE) {
                // A file system without this flag.
                Err(libc::EINVAL) => rename(0),
                renamed => renamed,
            },
        };
        renamed.map(drop)
    }
}

/// The content of the pid file of this process.
fn own_pid(buffer: &mut [u8; MAX_BYTES]) -> &[u8] {
    // SAFETY: the call changes nothing. libc's own function may be cached in the memory of the creator.
    let mut left = unsafe { call(libc::SYS_getpid, []) }.unwrap_or(0);
    let mut at = MAX_BYTES - 1;
    buffer[at] = b'\n';
    loop {
        at -= 1;
        (buffer[at], left) = (b'0' + (left % 10) as u8, left / 10);
        if left == 0 || at == 0 {
            return &buffer[at..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the pid file of the test program.
    fn write(path: &Path, existing: ExistingPidFile) -> Result<(), c_int> {
        let file = OwnPidFile::new(path, existing).expect("a path");
        // SAFETY: the texts live until the end of this function.
        unsafe { child(&file).write() }
    }

    fn child(file: &OwnPidFile) -> ChildPidFile {
        ChildPidFile {
            folder: file.folder.as_ptr(),
            name: file.name.as_ptr(),
            temporary: file.temporary.as_ptr(),
            existing: file.existing,
            follows_links: file.follows_links,
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_pid_file_is_created_replaced_refused_and_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p.pid");
        let read = || std::fs::read_to_string(&path).expect("a file");
        let own = format!("{}\n", std::process::id());
        assert_eq!(write(&path, ExistingPidFile::Refuse), Ok(()));
        assert_eq!(read(), own);
        assert_eq!(write(&path, ExistingPidFile::Refuse), Err(libc::EEXIST));
        for replaced in ["", "7\n", "7\nfurther line\n"] {
            std::fs::write(&path, replaced).expect("a file");
            assert_eq!(write(&path, ExistingPidFile::Replace), Ok(()), "{replaced:?}");
            assert_eq!(read(), own);
        }
        // SAFETY: the texts live until the end of this function.
        unsafe { child(&OwnPidFile::new(&path, ExistingPidFile::Replace).expect("a path")).remove() };
        assert_eq!(names(folder.path()), Vec::<String>::new());
        std::fs::write(&path, "7\n").expect("a file");
        // SAFETY: as above.
        unsafe { child(&OwnPidFile::new(&path, ExistingPidFile::Replace).expect("a path")).remove() };
        assert_eq!(read(), "7\n", "it names another process");
    }

    #[test]
    fn a_file_that_is_not_a_pid_file_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        std::fs::write(here.join("text"), "a text\n").expect("a file");
        std::os::unix::fs::symlink("text", here.join("link")).expect("a link");
        std::fs::create_dir(here.join("folder")).expect("a folder");
        for name in ["text", "link", "folder"] {
            assert_eq!(write(&here.join(name), ExistingPidFile::Replace), Err(libc::EINVAL), "{name}");
        }
        assert_eq!(std::fs::read_to_string(here.join("text")).expect("a file"), "a text\n");
        assert_eq!(write(&here.join("none/p.pid"), ExistingPidFile::Replace), Err(libc::ENOENT));
        assert_eq!(write(Path::new("/proc/self/cwd/p.pid"), ExistingPidFile::Replace), Err(libc::ELOOP));
        assert_eq!(names(here).len(), 3, "no temporary file remains");
        assert!(OwnPidFile::new(Path::new("p.pid"), ExistingPidFile::Replace).is_none());
    }

    #[test]
    fn a_process_of_the_own_user_follows_no_link() {
        let folder = tempfile::tempdir().expect("a folder");
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        std::fs::create_dir(&real).expect("a folder");
        std::os::unix::fs::symlink("real", &link).expect("a link");
        let file = |folder: &Path| OwnPidFile::without_links(&folder.join("p.pid"), ExistingPidFile::Refuse);
        assert!(file(&link).is_none() && file(&folder.path().join("none")).is_none());
        let file = file(&real).expect("no link");
        std::fs::rename(&real, folder.path().join("moved")).expect("it moves");
        std::os::unix::fs::symlink("moved", &real).expect("a link");
        // SAFETY: the texts live until the end of this function.
        assert_eq!(unsafe { child(&file).write() }, Err(libc::ELOOP), "a link that appeared since");
    }
}
