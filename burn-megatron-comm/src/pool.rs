//! The pool of communication buffers of a rank.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::buffer::{Buffer, DType};

/// The minimum number of elements of a pooled buffer. For smaller buffers, an allocation costs less than the lookup.
pub const MIN_POOLED_LEN: usize = 1024;

/// A pool of the communication buffers of one rank, which are reused for later operations with the same type and
/// length.
///
/// A buffer that was [taken](Self::take) from the pool may be [given back](Self::give). Engines give the inputs of
/// operations back. The pool counts the buffers in use for each type and length. It keeps a returned buffer only while
/// this count is positive, so it never holds more buffers than were taken. The caller may give back any buffer with the
/// same type and length as the taken buffer. A buffer that is never given back stays counted as in use.
///
/// All methods may be called from any thread.
#[derive(Default)]
pub struct BufferPool {
    classes: Mutex<HashMap<(DType, usize), SizeClass>>,
    allocated: AtomicU64,
    allocated_bytes: AtomicU64,
}

/// The buffers of one type and length.
#[derive(Default)]
struct SizeClass {
    free: Vec<Buffer>,
    in_use: usize,
}

impl BufferPool {
    /// Creates an empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a buffer of `len` elements from the pool. The contents of a reused buffer are unspecified; a new buffer
    /// contains zeros.
    pub fn take(&self, dtype: DType, len: usize) -> Buffer {
        self.take_free(dtype, len)
            .unwrap_or_else(|| Buffer::zeros(dtype, len))
    }

    /// Takes a buffer of `len` zeros from the pool.
    pub fn take_zeroed(&self, dtype: DType, len: usize) -> Buffer {
        match self.take_free(dtype, len) {
            None => Buffer::zeros(dtype, len),
            Some(mut used) => {
                used.fill_zeros();
                used
            }
        }
    }

    /// Gives a buffer back to the pool. The buffer is freed if no buffer of its type and length is in use, or if it has
    /// fewer than [`MIN_POOLED_LEN`] elements.
    pub fn give(&self, buffer: Buffer) {
        if buffer.len() < MIN_POOLED_LEN {
            return;
        }
        let mut classes = self.classes.lock();
        if let Entry::Occupied(mut class) = classes.entry((buffer.dtype(), buffer.len()))
            && class.get().in_use > 0
        {
            let class = class.get_mut();
            class.in_use -= 1;
            class.free.push(buffer);
        } else {
            // The buffer is freed outside of the lock.
            drop(classes);
        }
    }

    /// Frees all unused buffers and resets the counts of buffers in use.
    pub fn trim(&self) {
        let classes = std::mem::take(&mut *self.classes.lock());
        drop(classes);
    }

    /// Returns the number of buffers with at least [`MIN_POOLED_LEN`] elements that the pool has allocated so far.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Returns the total size in bytes of all buffers that the pool has [allocated](Self::allocated) so far.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// Returns the total size in bytes of the unused buffers in the pool.
    pub fn free_bytes(&self) -> u64 {
        let bytes = |((dtype, len), class): (&(DType, usize), &SizeClass)| {
            (dtype.size_of() * len * class.free.len()) as u64
        };
        self.classes.lock().iter().map(bytes).sum()
    }

    /// Takes a free buffer. Returns `None`, and counts an allocation, if the caller must allocate the buffer.
    fn take_free(&self, dtype: DType, len: usize) -> Option<Buffer> {
        if len < MIN_POOLED_LEN {
            return None;
        }
        let mut classes = self.classes.lock();
        let class = classes.entry((dtype, len)).or_default();
        class.in_use += 1;
        let used = class.free.pop();
        drop(classes);
        if used.is_none() {
            let bytes = (dtype.size_of() * len) as u64;
            self.allocated.fetch_add(1, Ordering::Relaxed);
            self.allocated_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        used
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("allocated", &self.allocated())
            .field("allocated_bytes", &self.allocated_bytes())
            .field("free_bytes", &self.free_bytes())
            .finish()
    }
}

/// A buffer that returns to its pool when it is dropped.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    buffer: Buffer,
    pool: Arc<BufferPool>,
}

impl PooledBuffer {
    pub fn new(buffer: Buffer, pool: &Arc<BufferPool>) -> Self {
        Self {
            buffer,
            pool: Arc::clone(pool),
        }
    }
}

impl Deref for PooledBuffer {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let empty = Buffer::empty(self.buffer.dtype());
        self.pool.give(std::mem::replace(&mut self.buffer, empty));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_kept_and_used_again() {
        let pool = BufferPool::new();
        let mut first = pool.take(DType::F32, 2000);
        assert_eq!(first, Buffer::zeros(DType::F32, 2000));
        assert_eq!((pool.allocated(), pool.allocated_bytes()), (1, 8000));
        first.write(0, &vec![5f32].into(), 0..1).unwrap();
        let kept = first.clone();
        pool.give(first);
        assert_eq!(pool.free_bytes(), 8000);
        assert_eq!(pool.take(DType::F32, 2000), kept);
        assert_eq!((pool.allocated(), pool.free_bytes()), (1, 0));
        // A buffer of another length or type is not reused.
        let _ = (pool.take(DType::F32, 2001), pool.take(DType::BF16, 2000));
        assert_eq!((pool.allocated(), pool.allocated_bytes()), (3, 20_004));
    }

    #[test]
    fn zeros_are_zeros_again() {
        let pool = BufferPool::new();
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let mut used = pool.take_zeroed(dtype, 1024);
            let ones = match dtype {
                DType::F32 => vec![1f32; 1024].into(),
                DType::BF16 => vec![half::bf16::ONE; 1024].into(),
                _ => Buffer::from(vec![1u8; 1024]),
            };
            used.write(0, &ones, 0..1024).unwrap();
            pool.give(used);
            assert_eq!(pool.take_zeroed(dtype, 1024), Buffer::zeros(dtype, 1024));
        }
        assert_eq!(pool.allocated(), 3);
    }

    #[test]
    fn no_more_is_kept_than_was_taken() {
        let pool = BufferPool::new();
        pool.give(vec![0f32; 5000].into());
        assert_eq!(pool.free_bytes(), 0);
        let taken = [pool.take(DType::F32, 5000), pool.take(DType::F32, 5000)];
        for buffer in taken.into_iter().chain([vec![0f32; 5000].into()]) {
            pool.give(buffer);
        }
        assert_eq!(pool.free_bytes(), 2 * 20_000);
        pool.trim();
        assert_eq!(pool.free_bytes(), 0);
    }

    #[test]
    fn small_buffers_are_not_pooled() {
        let pool = BufferPool::new();
        pool.give(pool.take(DType::F64, MIN_POOLED_LEN - 1));
        assert_eq!((pool.allocated(), pool.free_bytes()), (0, 0));
        pool.give(pool.take(DType::F64, MIN_POOLED_LEN));
        assert_eq!((pool.allocated(), pool.free_bytes()), (1, 8192));
    }

    #[test]
    fn a_pooled_buffer_returns_to_its_pool_also_when_a_thread_panics() {
        let pool = Arc::new(BufferPool::new());
        let lent = PooledBuffer::new(pool.take(DType::F32, 1024), &pool);
        let thread = std::thread::spawn(move || {
            let _lent = lent;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(thread.join().is_err());
        assert_eq!(pool.free_bytes(), 4096);
        pool.give(pool.take(DType::F32, 1024));
        assert_eq!(pool.allocated(), 1);
    }
}
