//! Launch image: the stack of a new process and everything that it reads, in one mapping.
//!
//! A forked process gets a copy of this mapping. It needs nothing of the heap, which may therefore stay out of the copy
//! ([`crate::memory::exclude_heap_from_forks`]).

use std::ffi::{CStr, CString, c_char, c_void};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use super::ExecRequest;
use super::child::ChildContext;

/// Much more than the few system calls need. Below everything else, so that an overflow faults.
const STACK: usize = 64 << 10;

pub struct Image {
    start: *mut u8,
    length: usize,
}

impl Image {
    /// `status`: where a forked process reports; -1: in this memory.
    pub fn of(birth: &ExecRequest<'_>, status: RawFd) -> io::Result<Image> {
        let groups = birth.ids.as_ref().map_or(&[][..], |(_, _, groups)| groups);
        let lists = [&birth.programs, &birth.args, &birth.env];
        let pointers: usize = lists.iter().map(|list| list.len() + 1).sum();
        let texts = lists.into_iter().flatten().chain([&birth.folder]);
        let bytes: usize = texts.map(|text| text.as_bytes_with_nul().len()).sum();
        let groups_at = STACK + size_of::<ChildContext>();
        let pointers_at = (groups_at + size_of_val(groups)).next_multiple_of(align_of::<*const c_char>());
        let texts_at = pointers_at + pointers * size_of::<*const c_char>();
        let image = Image::map(texts_at + bytes)?;
        let mut writer = Writer { image: &image, pointers_at, texts_at };
        let (programs, args, env) =
            (writer.list(&birth.programs), writer.list(&birth.args), writer.list(&birth.env));
        let inside = ChildContext {
            programs,
            args,
            env,
            folder: writer.text(&birth.folder),
            input: birth.input.as_raw_fd(),
            output: birth.output.as_raw_fd(),
            code: birth.code.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            status,
            ids: birth.ids.as_ref().map(|(user, group, groups)| {
                (*user, *group, image.at(groups_at).cast_const().cast(), groups.len())
            }),
            failed: None,
        };
        // SAFETY: both ranges are inside the mapping, aligned, and nothing else uses it yet.
        unsafe {
            ptr::copy_nonoverlapping(groups.as_ptr(), image.at(groups_at).cast(), groups.len());
            image.inside().write(inside);
        }
        Ok(image)
    }

    fn map(length: usize) -> io::Result<Image> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which replaces none.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, -1, 0) };
        match start == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Image { start: start.cast(), length }),
        }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    /// Right above the stack, which is a multiple of every alignment.
    pub fn inside(&self) -> *mut ChildContext {
        self.at(STACK).cast()
    }

    /// Its lowest address and its size.
    pub fn stack(&self) -> (*mut c_void, usize) {
        (self.start.cast(), STACK)
    }

    /// The failed step that a process reported in this memory.
    pub fn failed(&self) -> Option<(super::ExecStage, i32)> {
        // SAFETY: written in `of`; the process that may have changed it is its program or gone.
        unsafe { (*self.inside()).failed }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours. A forked process has a copy; one that borrows this memory was waited for.
        unsafe {
            libc::munmap(self.start.cast(), self.length);
        }
    }
}

/// Writes lists of texts. `Image::of` has counted them.
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
        // SAFETY: the range is inside the mapping, and aligned.
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
