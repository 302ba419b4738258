kFp8StaticTensorSym = "float8_e4m3fn, static, per tensor"
