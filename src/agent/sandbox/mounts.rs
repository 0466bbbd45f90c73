//! Mount namespace of a sandbox: private directories and read-only trees.
//!
//! The namespace is built on a thread of its own, which leaves the agent's namespace and ends; a descriptor keeps the
//! namespace until a process has entered it. Mounts of the host propagate into it, and no mount of it propagates to the
//! host. The private directories are a tmpfs, so they vanish with the last process of the launch.
//!
//! A read-only path is resolved inside the namespace with the rights of the spec's user, once. The read-only mount is made
//! of that descriptor and placed on that descriptor: a link that changes in between cannot place one directory on another.
//! A link of another user than root is not followed, since that user could redirect it after the start.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
    open_tree,
};

use super::SandboxError;
use crate::agent::account::Account;
use crate::agent::user_files::{FileError, Rights, UserFileError, WalkRule, assume_file_ids, locate};
use crate::model::{ProtectSystem, Sandbox};

/// The directories that `private_tmp` replaces.
pub const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];
/// Options of a private directory. The share of the host's memory bounds each of them.
const PRIVATE_OPTIONS: &std::ffi::CStr = c"mode=1777,size=20%";
/// The directories of the kernel, which stay as they are under `protect_system: strict`.
const KERNEL: [&str; 3] = ["/dev", "/proc", "/sys"];

/// The mounts of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountRules {
    private_tmp: bool,
    read_only: Vec<String>,
    protect: Option<ProtectSystem>,
}

impl MountRules {
    /// `None`: the sandbox needs no mount namespace.
    pub fn of(sandbox: &Sandbox) -> Option<MountRules> {
        let (private_tmp, protect) = (sandbox.private_tmp == Some(true), sandbox.protect_system);
        let is_any = private_tmp || protect.is_some() || !sandbox.read_only_paths.is_empty();
        is_any.then(|| MountRules { private_tmp, read_only: sandbox.read_only_paths.clone(), protect })
    }

    /// The fields that need the namespace.
    pub fn fields(&self) -> String {
        let fields = [
            ("sandbox.private_tmp", self.private_tmp),
            ("sandbox.read_only_paths", !self.read_only.is_empty()),
            ("sandbox.protect_system", self.protect.is_some()),
        ];
        let set: Vec<&str> =
            fields.into_iter().filter(|(_, is_set)| *is_set).map(|(field, _)| field).collect();
        set.join(", ")
    }
}

/// Builds the namespace. Blocks: paths of the user are resolved.
pub fn build(rules: &MountRules, rights: &Rights) -> Result<OwnedFd, SandboxError> {
    let (rules, account) = (rules.clone(), rights.account().clone());
    // A thread that left the agent's namespace must not serve other work.
    let thread = std::thread::Builder::new().name("mounts".to_owned());
    let thread = thread.spawn(move || build_here(&rules, &account)).map_err(UserFileError::NoThread)?;
    let failed = |_| UserFileError::ThreadFailed {
        what: "set up the mounts of the sandbox",
        user: rights.account().name().to_owned(),
    };
    thread.join().map_err(failed)?
}

/// Builds the namespace on the calling thread, which stays in it.
fn build_here(rules: &MountRules, account: &Account) -> Result<OwnedFd, SandboxError> {
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    let fails = |field: &'static str| {
        move |error: rustix::io::Errno| SandboxError::Host { field: field.to_owned(), source: error.into() }
    };
    let all = |error: rustix::io::Errno| SandboxError::Host { field: rules.fields(), source: error.into() };
    // SAFETY: no descriptor table is unshared. The working directory and the mounts become those of this thread alone.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(all)?;
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", slave).map_err(all)?;
    match rules.protect {
        None => {}
        Some(ProtectSystem::Strict) => protect_all().map_err(fails("sandbox.protect_system"))?,
        Some(level @ (ProtectSystem::True | ProtectSystem::Full)) => {
            let etc = (level == ProtectSystem::Full).then_some("/etc");
            for path in ["/usr", "/boot", "/efi"].into_iter().chain(etc) {
                protect_existing(path).map_err(fails("sandbox.protect_system"))?;
            }
        }
    }
    if rules.private_tmp {
        for path in PRIVATE {
            make_private(path).map_err(fails("sandbox.private_tmp"))?;
        }
    }
    for place in locate_all(&rules.read_only, account)? {
        make_read_only(&place).map_err(fails("sandbox.read_only_paths"))?;
    }
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open("/proc/thread-self/ns/mnt", flags, rustix::fs::Mode::empty()).map_err(all)
}

/// Opens the read-only paths with the rights of the account.
fn locate_all(paths: &[String], account: &Account) -> Result<Vec<OwnedFd>, SandboxError> {
    if paths.is_empty() {
        return Ok(Vec::new());
    }
    let failed = |path: &str, source: FileError| SandboxError::Path {
        path: PathBuf::from(path),
        user: account.name().to_owned(),
        source,
    };
    let is_other = !account.is_own();
    if is_other {
        assume_file_ids(&account.file_credentials()).map_err(|error| failed(&paths[0], error.into()))?;
    }
    let places = paths
        .iter()
        .map(|path| locate(path.as_ref(), WalkRule::Trusting(0)).map_err(|error| failed(path, error)));
    let places: Vec<OwnedFd> = places.collect::<Result<_, _>>()?;
    if is_other {
        // The agent's own ids, which the mounts need. The thread is not used afterwards.
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        // SAFETY: both calls take no pointers and change the calling thread alone.
        unsafe {
            libc::setfsuid(uid);
            libc::setfsgid(gid);
        }
    }
    Ok(places)
}

/// Makes every mount read-only, except the directories of the kernel, which keep the flags that they have.
fn protect_all() -> rustix::io::Result<()> {
    let mut kept = Vec::new();
    for path in KERNEL {
        match open_tree(CWD, path, clone_flags()) {
            Ok(tree) => kept.push((path, tree)),
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    let root = rustix::fs::open(
        "/",
        rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    set_read_only(&root)?;
    for (path, tree) in kept {
        move_mount(&tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

/// Makes a directory of the system read-only. Not every host has each of them.
fn protect_existing(path: &str) -> rustix::io::Result<()> {
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
        Ok(place) => make_read_only(&place),
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

fn clone_flags() -> OpenTreeFlags {
    OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE
}

/// Places a read-only copy of a tree on itself.
fn make_read_only(place: &OwnedFd) -> rustix::io::Result<()> {
    let tree = open_tree(place, "", clone_flags() | OpenTreeFlags::AT_EMPTY_PATH)?;
    set_read_only(&tree)?;
    let by_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tree, "", place, "", by_descriptor)
}

/// `struct mount_attr` of the kernel.
#[repr(C)]
#[derive(Default)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Makes a mount and all mounts below it read-only.
fn set_read_only(tree: &impl AsFd) -> rustix::io::Result<()> {
    const READ_ONLY: u64 = 1;
    let attributes = MountAttributes { set: READ_ONLY, ..MountAttributes::default() };
    // SAFETY: the arguments are an open descriptor, an empty path and a local structure with its size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<MountAttributes>(),
        )
    };
    if result < 0 {
        let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(rustix::io::Errno::from_raw_os_error(error));
    }
    Ok(())
}

/// Mounts an empty directory. One that the host does not have needs no replacement.
fn make_private(path: &str) -> rustix::io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    match mount("tmpfs", path, "tmpfs", flags, PRIVATE_OPTIONS) {
        Err(rustix::io::Errno::NOENT) => Ok(()),
        mounted => mounted,
    }
}
