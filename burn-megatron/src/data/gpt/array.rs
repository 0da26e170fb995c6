//! Integers in memory or in a mapped file, laid out as NumPy's `.npy`.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

/// The bytes before the numbers are a multiple of this.
const ALIGNMENT: usize = 64;

/// The type of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IntType {
    /// 16 bits with a sign.
    I16,
    /// 32 bits with a sign.
    I32,
    /// 32 bits without a sign.
    U32,
    /// 64 bits with a sign.
    I64,
}

impl IntType {
    /// How NumPy names it.
    fn name(self) -> &'static str {
        match self {
            Self::I16 => "<i2",
            Self::I32 => "<i4",
            Self::U32 => "<u4",
            Self::I64 => "<i8",
        }
    }

    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }
}

/// A number that an [`Array`] is made of.
pub trait Int: Copy {
    /// Its type.
    const TYPE: IntType;

    /// Appends its bytes.
    fn append(self, bytes: &mut Vec<u8>);
}

macro_rules! ints {
    ($($int:ty = $kind:ident),*) => {$(
        impl Int for $int {
            const TYPE: IntType = IntType::$kind;

            fn append(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
ints!(i16 = I16, i32 = I32, u32 = U32, i64 = I64);

/// Where the bytes are.
enum Bytes {
    Memory(Vec<u8>),
    File(Mmap),
}

/// Integers of one type, in one or two dimensions.
pub struct Array {
    int_type: IntType,
    shape: Vec<usize>,
    /// A whole `.npy` file.
    bytes: Bytes,
    /// Where the numbers begin.
    start: usize,
}

impl Array {
    /// The array of `values`, row by row, in memory.
    ///
    /// # Panics
    ///
    /// If `shape` does not have as many places as there are values.
    pub fn new<T: Int>(values: &[T], shape: &[usize]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{shape:?}");
        let header = header(T::TYPE, shape);
        let start = header.len();
        let mut bytes = header;
        bytes.reserve_exact(values.len() * T::TYPE.size());
        values.iter().for_each(|value| value.append(&mut bytes));
        Self {
            int_type: T::TYPE,
            shape: shape.to_vec(),
            bytes: Bytes::Memory(bytes),
            start,
        }
    }

    /// Maps a file that must have exactly this type and shape; nothing if it has not.
    ///
    /// # Errors
    ///
    /// Those of the operating system.
    pub fn open(path: &Path, int_type: IntType, shape: &[usize]) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        // Safety: the files of a cache are renamed when they are whole, and nobody changes them after that.
        let mapped = unsafe { Mmap::map(&file)? };
        let header = header(int_type, shape);
        let numbers = shape.iter().try_fold(1_usize, |x, y| x.checked_mul(*y));
        let size = numbers.and_then(|x| x.checked_mul(int_type.size())?.checked_add(header.len()));
        let fits = size == Some(mapped.len()) && mapped.starts_with(&header);
        Ok(fits.then(|| Self {
            int_type,
            shape: shape.to_vec(),
            bytes: Bytes::File(mapped),
            start: header.len(),
        }))
    }

    /// The type of the numbers.
    pub fn int_type(&self) -> IntType {
        self.int_type
    }

    /// The numbers of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of numbers.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number at a place, counted row by row.
    ///
    /// # Panics
    ///
    /// If there is no such place.
    pub fn get(&self, place: usize) -> i64 {
        let start = self.start + place * self.int_type.size();
        let bytes = &self.file()[start..];
        match self.int_type {
            IntType::I16 => i16::from_le_bytes(first(bytes)).into(),
            IntType::I32 => i32::from_le_bytes(first(bytes)).into(),
            IntType::U32 => u32::from_le_bytes(first(bytes)).into(),
            IntType::I64 => i64::from_le_bytes(first(bytes)),
        }
    }

    /// All numbers, row by row.
    pub fn iter(&self) -> impl Iterator<Item = i64> {
        (0..self.len()).map(|place| self.get(place))
    }

    /// The bytes of a whole `.npy` file.
    pub fn file(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Memory(bytes) => bytes,
            Bytes::File(mapped) => mapped,
        }
    }
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut first = [0; N];
    first.copy_from_slice(&bytes[..N]);
    first
}

/// What stands before the numbers, in version 1.0 of the format.
fn header(int_type: IntType, shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let shape = match shape.len() {
        1 => sizes.trim_end(),
        _ => sizes.trim_end_matches(", "),
    };
    let name = int_type.name();
    let mut text = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({shape}), }}");
    let before = 10;
    let size = (before + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', size - before - text.len() - 1));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.into_bytes());
    header
}

/// Names the type and the shape instead of printing the numbers.
impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({:?}, {:?})", self.int_type, self.shape)
    }
}
