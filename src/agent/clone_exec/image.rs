//! Launch image: the stack of a new process and all data that it reads, in one mapping.
//!
//! A forked process gets a copy of this mapping. It reads no heap memory, so the heap can be excluded from the copy
//! ([`crate::malloc::exclude_heap_from_forks`]).

use std::ffi::{CStr, CString, c_char, c_void};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use super::child::ChildContext;
use super::{ExecRequest, HELD_FROM, Restrictions};

/// Stack size: far more than the few system calls need. The stack is at the lowest address, so that an overflow faults.
const STACK: usize = 64 << 10;

/// The mapping of one launch.
pub struct Image {
    start: *mut u8,
    length: usize,
}

impl Image {
    /// `status`: pipe for the report of a forked process; -1: the process reports in this memory. `shares_table`: the
    /// process begins with the agent's descriptor table.
    pub fn of(request: &ExecRequest<'_>, status: RawFd, shares_table: bool) -> io::Result<Image> {
        let groups = request.ids.as_ref().map_or(&[][..], |(_, _, groups)| groups);
        let lists = [&request.programs, &request.args, &request.env];
        let pointers: usize = lists.iter().map(|list| list.len() + 1).sum();
        let texts = lists.into_iter().flatten().chain([&request.folder]);
        let bytes: usize = texts.map(|text| text.as_bytes_with_nul().len()).sum();
        let groups_at = STACK + size_of::<ChildContext>();
        let pointers_at = (groups_at + size_of_val(groups)).next_multiple_of(align_of::<*const c_char>());
        let texts_at = pointers_at + pointers * size_of::<*const c_char>();
        let image = Image::map(texts_at + bytes)?;
        let mut writer = Writer { image: &image, pointers_at, texts_at };
        let (programs, args, env) =
            (writer.list(&request.programs), writer.list(&request.args), writer.list(&request.env));
        let code = request.code.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let namespace = request.namespace.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let used = [request.input.as_raw_fd(), request.output.as_raw_fd(), code, status, namespace];
        let above_used = used.into_iter().fold(HELD_FROM, |above, fd| above.max(fd + 1));
        let context = ChildContext {
            programs,
            args,
            env,
            folder: writer.text(&request.folder),
            input: request.input.as_raw_fd(),
            output: request.output.as_raw_fd(),
            code,
            status,
            copied: if shares_table { above_used } else { -1 },
            ids: request.ids.as_ref().map(|(user, group, groups)| {
                (*user, *group, image.at(groups_at).cast_const().cast(), groups.len())
            }),
            restrictions: Restrictions { namespace, ..request.restrictions },
            failed: None,
        };
        // SAFETY: both ranges are inside the mapping and aligned, and no other code uses the mapping yet.
        unsafe {
            ptr::copy_nonoverlapping(groups.as_ptr(), image.at(groups_at).cast(), groups.len());
            image.context().write(context);
        }
        Ok(image)
    }

    fn map(length: usize) -> io::Result<Image> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, -1, 0) };
        match start == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Image { start: start.cast(), length }),
        }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    /// The context, right above the stack. The stack size is a multiple of every alignment.
    pub fn context(&self) -> *mut ChildContext {
        self.at(STACK).cast()
    }

    /// Lowest address and size of the stack.
    pub fn stack(&self) -> (*mut c_void, usize) {
        (self.start.cast(), STACK)
    }

    /// The failed step that a process reported in this memory.
    pub fn failed(&self) -> Option<(super::ExecStage, i32)> {
        // SAFETY: initialized in `of`. The process that may have changed it has called `execve` or is gone.
        unsafe { (*self.context()).failed }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping. A forked process has a copy; a vfork child was waited for.
        unsafe {
            libc::munmap(self.start.cast(), self.length);
        }
    }
}

/// Writes strings and lists into the image. `Image::of` has computed the space.
struct Writer<'a> {
    image: &'a Image,
    pointers_at: usize,
    texts_at: usize,
}

impl Writer<'_> {
    /// The list ends with a null pointer.
    fn list(&mut self, texts: &[CString]) -> *const *const c_char {
        let list = self.image.at(self.pointers_at).cast::<*const c_char>();
        let pointers: Vec<*const c_char> =
            texts.iter().map(|text| self.text(text)).chain([ptr::null()]).collect();
        // SAFETY: the range is inside the mapping and aligned.
        unsafe { ptr::copy_nonoverlapping(pointers.as_ptr(), list, pointers.len()) };
        self.pointers_at += size_of_val(pointers.as_slice());
        list.cast_const()
    }

    fn text(&mut self, text: &CStr) -> *const c_char {
        let bytes = text.to_bytes_with_nul();
        let at = self.image.at(self.texts_at);
        // SAFETY: the range is inside the mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        self.texts_at += bytes.len();
        at.cast_const().cast()
    }
}
