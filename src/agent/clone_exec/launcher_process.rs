//! Launcher process: receives images from the agent, and forks a process from each.
//!
//! It has no configuration, opens no file of others and reads nothing but its socket. See [`super::launcher`].

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::clone3;
use super::image::{Image, InlineImage};
use super::launcher::{ForkMessage, ForkReply, LAUNCHER_ARGUMENT, receive, send};

/// Serves as the launcher if this program was started as one, and does not return then.
pub fn serve_if_launcher() {
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|first| first == LAUNCHER_ARGUMENT) && args.next().is_none() {
        serve();
    }
}

/// Serves the socket on standard input until the agent closes it or is gone.
pub fn serve() -> ! {
    // No other user may read this memory or trace this process, nor a process that it forks.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    // SAFETY: descriptor 0 is open, and this function is its only user until the process ends.
    let socket = unsafe { OwnedFd::from_raw_fd(0) };
    let Ok(mut inline) = InlineImage::map() else { std::process::exit(1) };
    keep_from_children();
    let mut bytes = [0; ForkMessage::BYTES];
    loop {
        let received = receive(&socket, [&mut bytes, inline.data()]);
        let Ok((length @ 1.., descriptors)) = received else { std::process::exit(0) };
        let forked = fork(&bytes[..length.min(ForkMessage::BYTES)], &inline, length, descriptors);
        // The next process may have another user, and begins with a copy of this memory.
        inline.data()[..length.saturating_sub(ForkMessage::BYTES)].fill(0);
        let reply = match &forked {
            Ok((pid, pidfd)) => send(&socket, [&ForkReply(Ok(*pid)).encode(), &[]], &[pidfd.as_fd()]),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
                send(&socket, [&ForkReply(Err(errno)).encode(), &[]], &[])
            }
        };
        if reply.is_err() {
            std::process::exit(0);
        }
    }
}

/// Keeps mappings that a new process does not use out of it: copying and removing them is a large part of a fork. These are
/// the libraries for mathematics and unwinding.
fn keep_from_children() {
    const LIBRARIES: [&str; 2] = ["/libm.so.", "/libgcc_s.so."];
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for line in maps.lines() {
        if !LIBRARIES.iter().any(|library| line.contains(library)) {
            continue;
        }
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let Some((Some(from), Some(to))) = range.map(|(from, to)| (number(from), number(to))) else {
            continue;
        };
        // SAFETY: this changes nothing in this process, and a new process calls no function of these libraries.
        unsafe { libc::madvise(from as *mut libc::c_void, to - from, libc::MADV_DONTFORK) };
    }
}

/// Forks a process from an image. All descriptors of the request are closed afterwards, so that no later process gets them.
/// `received`: length of the message and the data of a small image.
fn fork(
    message: &[u8],
    inline: &InlineImage,
    received: usize,
    descriptors: Vec<OwnedFd>,
) -> io::Result<(u32, OwnedFd)> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let message = ForkMessage::decode(message).ok_or_else(invalid)?;
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or_else(invalid);
    let (input, output, status) = (next()?, next()?, next()?);
    let file = message.has_file.then(&mut next).transpose()?;
    let code = message.has_code.then(&mut next).transpose()?;
    let group = message.has_group.then(&mut next).transpose()?;
    let namespace = message.has_namespace.then(&mut next).transpose()?;
    let number = |value: u64| usize::try_from(value).map_err(|_| invalid());
    let (address, length) = (number(message.address)?, number(message.length)?);
    let mapped = file.map(|file| Image::receive(file, address, length)).transpose()?;
    let image = match &mapped {
        Some(image) => image,
        None => inline.image(address, length, received.saturating_sub(ForkMessage::BYTES))?,
    };
    // SAFETY: the agent initialized the context, for the address that it has here, and this process has its own copy.
    unsafe {
        let context = &mut *image.context();
        (context.streams.input, context.streams.output) = (input.as_raw_fd(), output.as_raw_fd());
        (context.status, context.copied) = (status.as_raw_fd(), -1);
        context.streams.code = code.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        context.restrictions.namespace = namespace.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    }
    let mut pidfd: c_int = -1;
    let group = group.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let pid = clone3::create(image, libc::CLONE_PARENT, &mut pidfd, group, std::ptr::null_mut())?;
    // SAFETY: the kernel wrote this descriptor, and no other code owns it.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}
