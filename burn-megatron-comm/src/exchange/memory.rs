//! Memory that stays put while a wire reads or writes it. All that is `unsafe` in this room is here.
//!
//! What goes out is read straight from the buffer that a rank gave, what comes in is written straight to
//! its place in a result. Nothing here leaves the thread that owns the wire.

use std::cell::UnsafeCell;
use std::mem;
use std::ops::Range;
use std::rc::Rc;
use std::slice;

use crate::buffer::{Buffer, with_elements};
use crate::pool::Lent;

/// A run of elements that goes to one rank. The buffer goes home to its pool with the last of them.
#[derive(Debug)]
pub struct Outgoing {
    source: Rc<Lent>,
    bytes: Range<usize>,
}

impl Outgoing {
    /// The elements `range` of `source`; `None` if there are none.
    pub fn new(source: &Rc<Lent>, range: Range<usize>) -> Option<Self> {
        let width = source.dtype().size_of();
        assert!(range.end <= source.len(), "the run lies in its buffer");
        (!range.is_empty()).then(|| Self {
            source: Rc::clone(source),
            bytes: range.start * width..range.end * width,
        })
    }

    /// The elements as bytes. Their place in memory does not change.
    pub fn bytes(&self) -> &[u8] {
        let whole = with_elements!(&**self.source, values => {
            // SAFETY: the elements are plain numbers: every byte of them is initialised.
            unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), mem::size_of_val(&values[..])) }
        });
        &whole[self.bytes.clone()]
    }
}

/// A buffer in which several ranks put their elements.
#[derive(Debug)]
pub struct Landing(Rc<UnsafeCell<Lent>>);

/// The place of one rank's elements in a [`Landing`].
#[derive(Debug)]
pub struct Incoming {
    start: *mut u8,
    bytes: usize,
    /// Keeps the memory.
    _landing: Rc<UnsafeCell<Lent>>,
}

impl Landing {
    /// Opens the `places` of a buffer, in elements: ascending, none reaching into the next. An empty place
    /// gives `None`.
    pub fn open(mut buffer: Lent, places: &[Range<usize>]) -> (Self, Vec<Option<Incoming>>) {
        let (width, len) = (buffer.dtype().size_of(), buffer.len());
        let start: *mut u8 = with_elements!(&mut *buffer, values => values.as_mut_ptr().cast());
        let landing = Rc::new(UnsafeCell::new(buffer));
        let mut free = 0;
        let place = |range: &Range<usize>| {
            if range.is_empty() {
                return None;
            }
            assert!(free <= range.start && range.end <= len, "places are apart");
            free = range.end;
            Some(Incoming {
                // SAFETY: the range lies in the buffer, as was just seen.
                start: unsafe { start.add(range.start * width) },
                bytes: range.len() * width,
                _landing: Rc::clone(&landing),
            })
        };
        let places = places.iter().map(place).collect();
        (Self(landing), places)
    }

    /// Opens one place of a buffer.
    pub fn at(buffer: Lent, place: Range<usize>) -> (Self, Option<Incoming>) {
        let (landing, mut places) = Self::open(buffer, slice::from_ref(&place));
        (landing, places.pop().flatten())
    }

    /// The buffer, once every place was given up.
    ///
    /// # Panics
    /// If a place is still open.
    pub fn close(self) -> Lent {
        let memory = Rc::try_unwrap(self.0).expect("a landing is closed when all have landed");
        memory.into_inner()
    }
}

impl Incoming {
    /// The size of the place.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where the place lies. As long as this value lives, its bytes are there and nobody else uses them.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "what MPI is told"))]
    pub fn address(&self) -> *mut u8 {
        self.start
    }

    /// Fills the place.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn fill(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes, "what comes fits its place");
        // SAFETY: no other place overlaps this one, and the buffer itself is out of reach until the landing
        // is closed, which needs this place to be gone. Every pattern of bits is a number.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }.copy_from_slice(bytes);
    }
}

/// The buffer itself, which then does not go home.
pub fn keep(mut lent: Lent) -> Buffer {
    let empty = Buffer::empty(lent.dtype());
    mem::replace(&mut *lent, empty)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{BufferPool, DType};

    fn lent(buffer: Buffer, pool: &Arc<BufferPool>) -> Lent {
        Lent::new(buffer, pool)
    }

    #[test]
    fn what_goes_out_comes_in_at_its_place() {
        let pool = Arc::default();
        let source = Rc::new(lent(vec![1i32, 2, 3, 4].into(), &pool));
        let (landing, places) =
            Landing::open(lent(vec![0i32; 5].into(), &pool), &[0..2, 2..2, 3..5]);
        let mut places = places.into_iter();
        let first = places.next().flatten().unwrap();
        assert!(places.next().unwrap().is_none());
        let last = places.next().flatten().unwrap();
        assert_eq!((first.len(), last.len()), (8, 8));
        last.fill(Outgoing::new(&source, 0..2).unwrap().bytes());
        first.fill(Outgoing::new(&source, 2..4).unwrap().bytes());
        assert!(Outgoing::new(&source, 4..4).is_none());
        assert_eq!(keep(landing.close()), vec![3i32, 4, 0, 1, 2].into());
    }

    #[test]
    fn memory_goes_home_with_its_last_user() {
        let pool = Arc::<BufferPool>::default();
        let source = Rc::new(lent(pool.take(DType::F32, 2048), &pool));
        let outgoing = Outgoing::new(&source, 0..1);
        drop(source);
        assert_eq!(pool.free_bytes(), 0);
        drop(outgoing);
        assert_eq!(pool.free_bytes(), 8192);
        let (landing, place) = Landing::at(lent(pool.take(DType::F32, 2048), &pool), 0..4);
        drop(landing);
        assert_eq!(pool.free_bytes(), 0);
        drop(place);
        assert_eq!(pool.free_bytes(), 8192);
    }

    #[test]
    #[should_panic(expected = "places are apart")]
    fn places_that_overlap_are_refused() {
        let pool = Arc::default();
        Landing::open(lent(vec![0u8; 4].into(), &pool), &[0..3, 2..4]);
    }

    #[test]
    #[should_panic(expected = "when all have landed")]
    fn a_landing_with_an_open_place_is_not_closed() {
        let pool = Arc::default();
        let (landing, _place) = Landing::at(lent(vec![0u8; 4].into(), &pool), 0..3);
        landing.close();
    }
}
