//! `FrameConverter`: planes of a decoded picture to RGB in a caller's buffer.

use std::cell::RefCell;
use std::slice;

use loongforge_ring::pixel::colour::Matrix;
use loongforge_ring::pixel::{
    self, Colour, Converter, Crop, Kernels, Layout, Picture, Rotation, Scratch,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::to_python;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One prepared conversion; safe to use from several threads.
#[pyclass(frozen, module = "loongforge_data._core")]
pub struct FrameConverter(Converter);

#[pymethods]
impl FrameConverter {
    #[new]
    #[pyo3(signature = (*, width, height, depth, chroma_shift, matrix, full_range, rotation=0, crop=None, size=None,
                        vector=true))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        width: usize,
        height: usize,
        depth: u32,
        chroma_shift: Option<(u32, u32)>,
        matrix: &str,
        full_range: bool,
        rotation: i32,
        crop: Option<(usize, usize, usize, usize)>,
        size: Option<(usize, usize)>,
        vector: bool,
    ) -> PyResult<Self> {
        let (shift_x, shift_y) = chroma_shift.unwrap_or((0, 0));
        let layout = Layout {
            width,
            height,
            depth,
            shift_x,
            shift_y,
            has_chroma: chroma_shift.is_some(),
        };
        let colour = Colour {
            matrix: matrix_named(matrix)?,
            full_range,
        };
        let crop = crop.map(|(top, left, height, width)| Crop {
            top,
            left,
            height,
            width,
        });
        let kernels = if vector {
            Kernels::Auto
        } else {
            Kernels::Scalar
        };
        let turn = Rotation::from_degrees(rotation).map_err(to_python)?;
        Converter::new(layout, colour, turn, crop, size, kernels)
            .map(Self)
            .map_err(to_python)
    }

    /// Height and width of the output.
    #[getter]
    fn output_size(&self) -> (usize, usize) {
        self.0.output_size()
    }

    /// Converts planes (buffers with their bytes per row) into `out`, from byte `offset` on.
    #[pyo3(signature = (planes, strides, out, offset=0))]
    fn run(
        &self,
        py: Python<'_>,
        planes: Vec<PyBuffer<u8>>,
        strides: Vec<usize>,
        out: PyBuffer<u8>,
        offset: usize,
    ) -> PyResult<()> {
        if planes.len() != strides.len() {
            return Err(PyValueError::new_err(format!(
                "{} planes but {} strides were given: each plane needs its bytes per row",
                planes.len(),
                strides.len()
            )));
        }
        if out.readonly() || !out.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "the output buffer must be writable and contiguous",
            ));
        }
        let need = self.0.output_bytes();
        let end = offset
            .checked_add(need)
            .filter(|end| *end <= out.len_bytes());
        if end.is_none() {
            return Err(PyValueError::new_err(format!(
                "the picture needs {need} bytes from byte {offset} on, the output buffer has {}",
                out.len_bytes()
            )));
        }
        if planes.iter().any(|plane| !plane.is_c_contiguous()) {
            return Err(PyValueError::new_err("a plane buffer is not contiguous"));
        }
        // SAFETY: the buffers are held until the end of this call; the bounds of `out` were checked above. As with
        // every writable buffer in Python, the caller must not let two threads write to the same bytes.
        let target =
            unsafe { slice::from_raw_parts_mut(out.buf_ptr().cast::<u8>().add(offset), need) };
        let sources: Vec<(&[u8], usize)> = planes
            .iter()
            .zip(strides)
            .map(|(plane, stride)| {
                // SAFETY: the buffer is held, contiguous, and `len_bytes` long.
                (
                    unsafe {
                        slice::from_raw_parts(plane.buf_ptr().cast::<u8>(), plane.len_bytes())
                    },
                    stride,
                )
            })
            .collect();
        let job = Job {
            converter: &self.0,
            sources: &sources,
            target,
        };
        py.detach(move || job.run()).map_err(to_python)
    }
}

struct Job<'a> {
    converter: &'a Converter,
    sources: &'a [(&'a [u8], usize)],
    target: &'a mut [u8],
}

impl Job<'_> {
    fn run(self) -> loongforge_ring::Result<()> {
        let picture = Picture::new(self.converter.layout(), self.sources)?;
        SCRATCH.with_borrow_mut(|scratch| self.converter.run(&picture, self.target, scratch))
    }
}

fn matrix_named(name: &str) -> PyResult<Matrix> {
    Ok(match name {
        "bt601" => Matrix::Bt601,
        "bt709" => Matrix::Bt709,
        "bt2020" => Matrix::Bt2020,
        "smpte240m" => Matrix::Smpte240m,
        "fcc" => Matrix::Fcc,
        _ => {
            return Err(PyValueError::new_err(format!(
                "matrix is {name:?}, allowed are bt601, bt709, bt2020, smpte240m and fcc"
            )));
        }
    })
}

/// Name of the fastest kernels this processor can run: "avx2" or "scalar".
#[pyfunction]
pub fn vector_kernels() -> &'static str {
    if pixel::vector_available() {
        "avx2"
    } else {
        "scalar"
    }
}

/// 64-bit checksum of a contiguous buffer.
#[pyfunction]
pub fn checksum(py: Python<'_>, data: PyBuffer<u8>) -> PyResult<u64> {
    if !data.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer must be contiguous"));
    }
    // SAFETY: the buffer is held during the call, contiguous, and `len_bytes` long.
    let bytes = unsafe { slice::from_raw_parts(data.buf_ptr().cast::<u8>(), data.len_bytes()) };
    Ok(py.detach(|| loongforge_ring::checksum::checksum(bytes)))
}
