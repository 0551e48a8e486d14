"""The character tables of published tokenizers: Unicode 16, as in tiktoken 0.14 and in tokenizers 0.23.

The content is compressed; see :mod:`lm.text.character_tables` for the format.
"""

import base64
import zlib

_DATA = (
    "c-q}rNw(a$5xf$SNKEI!wn!|5y1yd=AiJdQmY=M)^y~%db3!7=$l>?)CG}9hgb~sej#1v0M}FbQd;Su-;b*iNhV?M~vJqZk#4F%QxZ((J<4<"
    "{+<4t|z?Jr#Rlkb0S*>fGAYyOQm*PrY4&i=H|KEA)7+Z46w&mQ|}9jtF|I`Nm<=U!#YvUv4Bz0Yv4mz5dn@EPD^KGP_4F|Klk@JPuA{M(_c7"
    "hNxOA9#za*m<{gR&dc?F-dw_;m0`UzI~GTPT}SMh<A^0mS3uU`%TgD3l>ZqD;)uV<wPhO@PX44luSk2UZK}%rTcWESQ+7fM-6Nr2(@@xAn^I"
    "LGtAcLb0@q9`!XJJKVIRB83&IF&J*!zJWdd`SsSQLP;-40&o+&2+(8dJ%&<S;VK^gJ0+RuVJ1w1&*SHL!r%3>vxmSGYIMyLZj5E1*g-WI-7`"
    "H)Q$YjR;Fe$%rL9$s$tV1ZCEipg|3nV}okuv#J<TLV0T6qa|l3miv`sjn6Jqt8D1@J|)N8A^j#WTxA-auM<Jw&SUEbjayl{RaY@@W}$m!@s5"
    "U?K>5=Jo#1@_iC{<m(0NYw4(>E0Y%)2ZBX$<M?ZRJu_YNIW%MtEI}x_khsd{vT7W)r!#?<Ef9Y~ewYY*PdUYa_Sz#*hr?Y(ZUwyhhRE@iG@p"
    "d>()vw=m*9rZbnDgO-JjcNM<@X{xXP`DCZ}4e43*;gwhUP;vY|`av~BH~XUXev)^s=x&PC{eOgZZa%RsR_DwHexzLBzxz7FDPJtTi3O3l;P4"
    "6KcO*|DQ^EjZOuO{RbG9Vj5M$UE2@;AHS`h&-K9drWbYXNKr2Od^?u=uia&Q<%~(nIHfZ%nrcyZZD@Hm}sLlxrFV|S=WAF#P}C)6}_qKyG$R"
    "9qd^`zQ3km5{H}10S7vz63}LXTe1T>%bvH{w0Tm%F6CSJ$bv2MMUR1geK99@B>n`C0KpS*NBnitQWGNiCj4u^uU=fHW2BORD(=2cupc3^c59"
    "bez8^?mQV;KsvIO8XiEZ;`lM1d9FLzf46X>`<&vzeh81)%N?@!`nSg;v}cRZh4c(Faf&;sQ|z3*MRMV?L>~!LpMvD1M-!R};3Uw<D6?jJ?Xh"
    "0ZdN{mE~eYwDfYH85K>WEkUrH+5gvb+Amz~|3Ze!ID0eRDz5A2{jLX}rMJxA&!=2)e-?PFv3bRP7hn7ig*>YSe1|8vzuzJ(zc6bL^DovDS|m"
    "q+_mD3EE3#@@=p+z~3@B_x#^<lfRXFOnn}xVa%@IL4zt{CzY^qc+Ppm<HY_K%-!TWF}>ER+nK5~ZCfE+M@%!gL4UbxNixZ*KdQ+dQLE*yxhd"
    "e^h@n>x^++7KD&H}wnuc%MkMuDdfXbU`mmg)%MhRt-hUT}=m){;34r1pMDw#AW9mM|puXqfCXA0@$RV0iM}Dt9~4ou6E)HS{noWt5%&%6s+k"
    "cGg4#G;s9+|`Q!ppxBzewU)QeMG!KF~eG7(FMuuw&Z)026$IPigWE^V&i3$*#Ad0ipv)q_SvdX`1$A44t$W_kVu2SqjCIa;!iK)CqvZ*K^W*"
    "gsYUE=R_w)r^(vA=phK3dry<~Z&3y>I-F)4Q!UX|1on1V~IBJQ3q4?pQgm49moidJJX2r6~~V5B#Yt$dJb?ZJ_+mt|Y50QE@7lswfhT6j;IN"
    "MeD4`SQ_|HS)&TVhsrxtjNF!1H5*t9k&Aj)y=<f`j#b+wmGUa`Ohrymjbpw#Gqfg*BbH2v0G4K2PYkcB&tGep<*$mcN~~$`!!l@uqKeDdO?d"
    "0o6G#$Q!6`z#zCg&3GSWI+t{rz796q|GaDXtr&Df1&p(qxM$=M933^r<bRg3%^6M?yL#)gwu)<~?>z8T7)QUkuk5BZGU%V5Kb#VV4-$welSc"
    "Jq_?92Gd{E3q@1`Q>PLP`M`XR4(C>%4>EJWq4vs5D!_9x<L90m)dB+4J~D`-K-a@%vewA1mz@c&KiCanjir(=<)Jnmb#Vv=G&J(@dJ%{GC9g"
    "SC`Ci^H%B){hn3edJ=1!uoRf?b@uI0AJlGyO8yxh^>T7b7N>r=+?(o!%Nw}-hn~d!d8se*UueXZQg%%Wvo8nV<s0TU_6e+<kBYuPI<$11h8{"
    "gBZ?^dp<2ZcdFvJBSX);KEVpGb38Uel``xw?RRcmj+@A?y+liGR=%!2SUYc6eujozgqe3a`W#o6dxOq249<%x@52v=Vo4S!w>GUNLNqsF7m>"
    "O-BSZjxri|Y9xZ74ahHW4O1tAvm+j(eFPQdKSmt_l05qrS9eG4HcHR-Y>kEGDbte10C4C?M&WIHu%bQ{2O``!5ecHp-jWj;SCUX~u;zWxD4V"
    "IEhE;PC1k0-WVUo{YEUaFPQHbCr#L$l7!2f=9aCgo3=-}@36EUT;+hyYuc5@!KH?dIQ7^kmMNl>2-$XPfbHCPvJHL0vZw6wZqHMoq@gF;iYl"
    "yjLeWHC-|8dDo*D~M4lrx5nQ$L{l>md3s}2yk}`Mn##1TVM&%b`e)7Yfb93lBO}oJEGFzG=Sk#_k5z>aJBk>itbCAlUUF+x=@78*u>$U$Wj3"
    "u(Xg94_z)JX8nOjW!h8W5zD@KBcrhn#V2S<o*mE-2OJj_pK~P;E9~ZHPAg&n%{TEJD;$u9(OxDOkjj@j2ddva=ePd_Z@6#Sk^+@MxoC9#QvV"
    ">HJ?aSKGE(;9MN*YF825UCLDKJGq1LYBp#&V1XFvt-i6q*;J9!wi~b*D)UcWVU1RAbN8H7pFv;3X1Oh!MMvQ!Xs6?-pLNFT2qV04Hl~d1&_~"
    "RnS>sOb4<!hY5Vs>b5cv4xV|y<vFUOy-@xY%|wW3woMqMBY<ZB7FTA4+FedxTTF_sXZ+VRp$qiwJ+CA9A)u*<cvLEYEOCxT$&|Sl_{7GZ-jC"
    "(Qj<X7)Q&n$dK?__(t76Vc9V%Gt%Ll}dCr6>cGbkW(f|FUWpv5`mLO^Ol#Qq%>ka`*2Eg@4PPx6;ZBh-Db{|m4j!s1_uht|(`X{1lXy%n#Jt"
    "lxE|qCXy?^in4opU3&%{Z<~w)>1$Dhp+XIjw_*$3~&loWw_=jj2#LSev-4(=fZ))?_eH)qS*t7sL^0h<lYehD`g;zVu%Ai4m=ACt=zmOh-@I"
    "}u5eXih@zGL=yaaC?$O<7{(Tp7c*}&fQQ013Zlp}`a5S38`p%f`zP-MeinQC-KN3+=lzee^e{pYH>D6u@ym45d{LC9!vytuRekbJ54d1N$-R"
    "<E1Nl%DRSAJ?b+!(WJK_YWXddTC#J;z@^u_!<x2K+ST4IbLSihzN}>1D!g6%}@6tJY#14}b+AevRe`+Pq5ac2?9NCP!3Ene>(c(7yO^J{2Ka"
    "i5=|b4Z6|U!C4!&HAFs`gRF4w#xZANb#E*}W-3{5P`q$P0WZN*M|MiABhrC1)exQlhR|TRU<dHd$VAKVq<;aoa2Fc"
)
PUBLISHED_TABLES = zlib.decompress(base64.b85decode(_DATA)).decode()
