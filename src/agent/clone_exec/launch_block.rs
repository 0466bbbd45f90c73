//! Launch image: the stack of a new process and all data that it reads, in one mapping.
//!
//! The image of a process that the launcher creates is its data alone, with offsets from the start of the image instead of
//! pointers. It travels to the launcher, which copies it to a mapping of its own ([`super::slot`]).

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr;

use super::child::{ChildContext, ChildCreator, ChildStreams, FailedStep};
use super::own_pid_file::ChildPidFile;
use super::{ExecRequest, HELD_FROM, Restrictions, Streams};
use crate::agent::file_limit;

/// Stack size: far more than a child needs. The stack is at the lowest address, so that an overflow faults.
pub const STACK: usize = 256 << 10;

/// Maximum size of data that travels in a request to the launcher.
pub const MAX_INLINE: usize = 32 << 10;
/// Maximum size of an image: more than the kernel accepts as arguments and environment.
pub const MAX_IMAGE: usize = 64 << 20;

/// Stack and context of a new process.
pub struct ChildMemory {
    pub stack: *mut c_void,
    pub stack_size: usize,
    pub context: *mut ChildContext,
}

impl ChildMemory {
    /// The memory of an image: the stack is at its lowest address, and the context right above. The stack size is a multiple of
    /// every alignment.
    pub fn at(start: *mut u8) -> ChildMemory {
        let context = start.wrapping_add(STACK).cast();
        ChildMemory { stack: start.cast(), stack_size: STACK, context }
    }
}

/// The image of one launch.
pub struct LaunchBlock {
    /// The lowest address of the stack, also where the image has data only.
    start: *mut u8,
    length: usize,
    /// The address of `start` that pointers are relative to.
    target: usize,
    memory: ImageMemory,
}

/// The memory of an image.
enum ImageMemory {
    Mapping,
    /// A mapping of [`SPARE_LENGTH`] that the next launch of the thread uses again.
    Spare,
    /// The data without the stack.
    Data(Vec<u64>),
}

impl LaunchBlock {
    /// The image of a process that shares the agent's memory. `shares_table`: the process begins with the agent's descriptor
    /// table.
    pub fn private(request: &ExecRequest<'_>, shares_table: bool) -> io::Result<LaunchBlock> {
        LaunchBlock::build(request, shares_table, LaunchBlock::map_private)
    }

    /// The data of a process that the launcher creates.
    pub fn data(request: &ExecRequest<'_>) -> io::Result<LaunchBlock> {
        LaunchBlock::build(request, false, LaunchBlock::allocate)
    }

    fn build(
        request: &ExecRequest<'_>,
        shares_table: bool,
        map: fn(usize) -> io::Result<LaunchBlock>,
    ) -> io::Result<LaunchBlock> {
        let groups = request.ids.as_ref().map_or(&[][..], |(_, _, groups)| groups);
        let lists = [&request.programs, &request.args, &request.env];
        let pointers: usize = lists.iter().map(|list| list.len() + 1).sum();
        let of_pid_file =
            request.pid_file.iter().flat_map(|file| [&file.folder, &file.name, &file.temporary]);
        let texts = lists.into_iter().flatten().chain([&request.folder]).chain(of_pid_file);
        let bytes: usize = texts.map(|text| text.as_bytes_with_nul().len()).sum();
        let groups_at = STACK + size_of::<ChildContext>();
        let pointers_at = (groups_at + size_of_val(groups)).next_multiple_of(align_of::<*const c_char>());
        let texts_at = pointers_at + pointers * size_of::<*const c_char>();
        let image = map(texts_at + bytes)?;
        let mut writer = Writer { image: &image, pointers_at, texts_at };
        let (programs, args, env) =
            (writer.list(&request.programs), writer.list(&request.args), writer.list(&request.env));
        let Streams { input, output, code } = request.streams;
        let (input, output) = (input.as_raw_fd(), output.as_raw_fd());
        let code = code.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let namespace = request.namespace.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let used = [input, output, code, namespace];
        let above_used = used.into_iter().fold(HELD_FROM, |above, fd| above.max(fd + 1));
        let context = ChildContext {
            programs,
            args,
            env,
            lists: (pointers_at, pointers),
            folder: writer.text(&request.folder),
            streams: ChildStreams { input, output, code },
            status: -1,
            creator: ChildCreator {
                copied: if shares_table { above_used } else { -1 },
                agent: 0,
                resets_signals: true,
            },
            ids: request
                .ids
                .as_ref()
                .map(|(user, group, groups)| (*user, *group, image.target(groups_at).cast(), groups.len())),
            restrictions: Restrictions {
                namespace,
                ..request.restrictions.with_file_limit(file_limit::original())
            },
            pid_file: request.pid_file.as_ref().map(|file| ChildPidFile {
                folder: writer.text(&file.folder),
                name: writer.text(&file.name),
                temporary: writer.text(&file.temporary),
                existing: file.existing,
                follows_links: file.follows_links,
            }),
            failed: None,
        };
        // SAFETY: both ranges are inside the mapping and aligned, and no other code uses the mapping yet.
        unsafe {
            ptr::copy_nonoverlapping(groups.as_ptr(), image.at(groups_at).cast(), groups.len());
            image.context().write(context);
        }
        Ok(image)
    }

    fn map_private(length: usize) -> io::Result<LaunchBlock> {
        let is_spare = length <= SPARE_LENGTH;
        if let Some(spare) = SPARE_MAPPING.take().filter(|_| is_spare) {
            let start = ManuallyDrop::new(spare).0;
            return Ok(LaunchBlock { start, length, target: start as usize, memory: ImageMemory::Spare });
        }
        let (mapped, memory) = match is_spare {
            true => (SPARE_LENGTH, ImageMemory::Spare),
            false => (length, ImageMemory::Mapping),
        };
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces no other mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped, access, kind, -1, 0) };
        match start == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(LaunchBlock { start: start.cast(), length, target: start as usize, memory }),
        }
    }

    fn allocate(length: usize) -> io::Result<LaunchBlock> {
        if length > MAX_IMAGE {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        let mut data = vec![0u64; (length - STACK).div_ceil(size_of::<u64>())];
        let start = data.as_mut_ptr().cast::<u8>().wrapping_sub(STACK);
        Ok(LaunchBlock { start, length, target: 0, memory: ImageMemory::Data(data) })
    }

    /// The data for the launcher; `None`: the image is a mapping.
    pub fn content(&self) -> Option<&[u8]> {
        match &self.memory {
            ImageMemory::Mapping | ImageMemory::Spare => None,
            // SAFETY: the vector has at least this length, and bytes have no invalid values.
            ImageMemory::Data(data) => {
                Some(unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), self.length - STACK) })
            }
        }
    }

    /// An offset as a pointer of the image.
    fn target(&self, offset: usize) -> *const u8 {
        (self.target + offset) as *const u8
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    fn context(&self) -> *mut ChildContext {
        self.memory().context
    }

    /// Stack and context; the stack of data alone does not exist.
    pub fn memory(&self) -> ChildMemory {
        ChildMemory::at(self.start)
    }

    /// The failed step that a process reported in this memory.
    pub fn failed(&self) -> Option<FailedStep> {
        // SAFETY: initialized in `build`. The process that may have changed it has called `execve` or is gone.
        unsafe { (*self.context()).failed }
    }
}

impl Drop for LaunchBlock {
    fn drop(&mut self) {
        match self.memory {
            ImageMemory::Data(_) => {}
            ImageMemory::Spare => {
                // The environment may contain secrets.
                // SAFETY: the range is inside the mapping, which a vfork child no longer uses.
                unsafe { ptr::write_bytes(self.at(STACK), 0, self.length - STACK) };
                SPARE_MAPPING.set(Some(SpareMapping(self.start)));
            }
            // SAFETY: this value owns the mapping, and a vfork child was waited for.
            ImageMemory::Mapping => unsafe {
                libc::munmap(self.start.cast(), self.length);
            },
        }
    }
}

/// A private mapping for the next launch of this thread: the kernel interrupts every thread of the agent to unmap one.
struct SpareMapping(*mut u8);

thread_local! {
    static SPARE_MAPPING: Cell<Option<SpareMapping>> = const { Cell::new(None) };
}

/// The length of a spare mapping: enough for the arguments and the environment of most launches.
const SPARE_LENGTH: usize = STACK + MAX_INLINE;

impl Drop for SpareMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe {
            libc::munmap(self.0.cast(), SPARE_LENGTH);
        }
    }
}

/// Writes strings and lists into the image. `LaunchBlock::build` has computed the space.
struct Writer<'a> {
    image: &'a LaunchBlock,
    pointers_at: usize,
    texts_at: usize,
}

impl Writer<'_> {
    /// The list ends with a null pointer.
    fn list(&mut self, texts: &[CString]) -> *const *const c_char {
        let at = self.pointers_at;
        let list = self.image.at(at).cast::<*const c_char>();
        let pointers: Vec<*const c_char> =
            texts.iter().map(|text| self.text(text)).chain([ptr::null()]).collect();
        // SAFETY: the range is inside the mapping and aligned.
        unsafe { ptr::copy_nonoverlapping(pointers.as_ptr(), list, pointers.len()) };
        self.pointers_at += size_of_val(pointers.as_slice());
        self.image.target(at).cast()
    }

    fn text(&mut self, text: &CStr) -> *const c_char {
        let bytes = text.to_bytes_with_nul();
        let at = self.texts_at;
        // SAFETY: the range is inside the image.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.image.at(at), bytes.len()) };
        self.texts_at += bytes.len();
        self.image.target(at).cast()
    }
}
