//! Launcher process: receives images from the agent, and forks a process from each.
//!
//! It has no configuration, opens no file and reads nothing but its socket. See [`super::launcher`].

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use super::clone3;
use super::image::Image;
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
    let mut bytes = [0; ForkMessage::BYTES];
    loop {
        let Ok((length @ 1.., descriptors)) = receive(&socket, &mut bytes) else { std::process::exit(0) };
        let forked = fork(&bytes[..length], descriptors);
        let reply = match &forked {
            Ok((pid, pidfd)) => send(&socket, &ForkReply(Ok(*pid)).encode(), &[pidfd.as_fd()]),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
                send(&socket, &ForkReply(Err(errno)).encode(), &[])
            }
        };
        if reply.is_err() {
            std::process::exit(0);
        }
    }
}

/// Forks a process from an image. All descriptors of the request are closed afterwards, so that no later process gets them.
fn fork(message: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<(u32, OwnedFd)> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let message = ForkMessage::decode(message).ok_or_else(invalid)?;
    let mut descriptors = descriptors.into_iter();
    let mut next = || descriptors.next().ok_or_else(invalid);
    let file = next()?;
    let (input, output, status) = (next()?, next()?, next()?);
    let code = message.has_code.then(&mut next).transpose()?;
    let group = message.has_group.then(&mut next).transpose()?;
    let namespace = message.has_namespace.then(&mut next).transpose()?;
    let number = |value: u64| usize::try_from(value).map_err(|_| invalid());
    let image = Image::receive(file, number(message.address)?, number(message.length)?)?;
    // SAFETY: the agent initialized the context; `receive` mapped it at the address that it has there, and this process has
    // its own copy.
    unsafe {
        let context = &mut *image.context();
        (context.streams.input, context.streams.output) = (input.as_raw_fd(), output.as_raw_fd());
        (context.status, context.copied) = (status.as_raw_fd(), -1);
        context.streams.code = code.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        context.restrictions.namespace = namespace.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    }
    let mut pidfd: c_int = -1;
    let group = group.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let pid = clone3::create(&image, libc::CLONE_PARENT, &mut pidfd, group)?;
    // SAFETY: the kernel wrote this descriptor, and no other code owns it.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}
